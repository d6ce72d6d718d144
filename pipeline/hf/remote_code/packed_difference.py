"""The difference of a trained model's weights from its base's, in few bits.

A matrix [out, in] is stored row by row in groups of GROUP columns. In 4 and 8 bits an element is an
integer times the scale of its group, in 16 bits it is the difference itself in bf16. Scales are in
bf16: a difference may be as small as a learning rate, which is below the range of fp16. Everything
is held as integers, which neither DeepSpeed nor `Module.to` casts to another type.

Rows and groups are independent of each other. So a part of a matrix for a tensor-parallel rank is a
part of the codes and of the scales: any rows, or columns from a multiple of GROUP on.

Needs torch alone: `scale-cpt convert` packs with this file, and exported folders carry it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32
"""How many columns of a row share a scale."""
ROWS_AT_ONCE = 2**20
"""Elements that are packed at a time: the search holds some copies of them in fp32."""
_SEARCHED = 24
"""How many scales of a group are tried."""
_SMALLEST = 0.4
"""The smallest scale that is tried, over the one that reaches the group's largest element."""


class PackedMatrix(nn.Module):
    """A difference [rows, columns] in 4, 8 or 16 bits, by groups."""

    codes: Tensor
    scales: Tensor

    def __init__(self, rows: int, columns: int, bits: int) -> None:
        super().__init__()
        self.columns = columns
        self.bits = bits
        groups = -(-columns // GROUP)  # rounded up: the last group is padded with zeros
        if bits == 16:
            self.register_buffer("codes", torch.zeros(rows, columns, dtype=torch.int16))
            return
        # In 4 bits a byte holds two elements.
        row_bytes = groups * GROUP * bits // 8
        self.register_buffer("codes", torch.zeros(rows, row_bytes, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(rows, groups, dtype=torch.int16))

    def unpacked(self) -> Tensor:
        """The difference in fp32: [rows, columns]."""
        if self.bits == 16:
            return values_of(self.codes)
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)
        integers = codes.float().sub_(2 ** (self.bits - 1)).unflatten(1, (-1, GROUP))
        products = integers.mul_(values_of(self.scales).unsqueeze(-1))
        return products.flatten(1)[:, : self.columns]


class PackedVector(nn.Module):
    """The difference of a gain or of a bias, [size], in bf16."""

    codes: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(size, dtype=torch.int16))

    def unpacked(self) -> Tensor:
        """The difference in fp32: [size]."""
        return values_of(self.codes)


class PackedRows(nn.Module):
    """The difference of an embedding or an output, in bf16: a row for each of some tokens, and one
    that all other tokens share.
    """

    codes: Tensor
    row_of_token: Tensor

    def __init__(self, rows: int, columns: int, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(rows, columns, dtype=torch.int16))
        self.register_buffer("row_of_token", torch.zeros(vocab_size, dtype=torch.int32))

    def unpacked(self) -> Tensor:
        """The difference in fp32: [vocab_size, columns]."""
        return values_of(self.codes)[self.row_of_token]


def bits_of(values: Tensor) -> Tensor:
    """Numbers in bf16, as the integers of their bits."""
    return values.to(torch.bfloat16).view(torch.int16)


def values_of(bits: Tensor) -> Tensor:
    """The inverse of `bits_of`, in fp32."""
    return bits.view(torch.bfloat16).float()


def packed(difference: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """The codes and scales of a PackedMatrix: difference [rows, columns] in fp32 -> codes [rows,
    bytes] and scales [rows, groups]; in 16 bits there are no scales.
    """
    if bits == 16:
        return bits_of(difference), None
    all_codes = []
    all_scales = []
    rows_at_once = max(1, ROWS_AT_ONCE // difference.shape[1])
    for rows in difference.split(rows_at_once):
        padded = F.pad(rows, (0, -rows.shape[1] % GROUP))
        groups = padded.unflatten(1, (-1, GROUP))
        scales = _searched_scales(groups, bits)
        codes = _integers(groups, scales, bits).add_(2 ** (bits - 1)).to(torch.uint8).flatten(1)
        if bits == 4:
            codes = codes[:, ::2] << 4 | codes[:, 1::2]
        all_codes.append(codes)
        all_scales.append(bits_of(scales))
    return torch.cat(all_codes), torch.cat(all_scales)


def _integers(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The nearest integers of `bits` bits, signed: groups [..., GROUP], scales [...]."""
    largest = 2 ** (bits - 1) - 1
    # A group of zeros has the scale 0.
    ratio = groups / scales.clamp(min=1e-38).unsqueeze(-1)
    return ratio.round_().clamp_(-largest - 1, largest)


def _searched_scales(groups: Tensor, bits: int) -> Tensor:
    """The scale of each group [..., GROUP] that makes the smallest squared error: [...] in fp32.

    The scale by which the largest element is stored exactly is rarely the best in 4 bits: a smaller
    one cuts that element off, and stores the others better.
    """
    reaching = groups.abs().amax(-1) / (2 ** (bits - 1) - 1)
    best = torch.zeros_like(reaching)
    least = torch.full_like(reaching, torch.inf)
    for share in torch.linspace(1.0, _SMALLEST, _SEARCHED).tolist():
        # Rounded before its error is measured: the codes are made for the scale that is stored.
        scales = values_of(bits_of(share * reaching))
        stored = _integers(groups, scales, bits).mul_(scales.unsqueeze(-1))
        error = stored.sub_(groups).square_().sum(-1)
        is_better = error < least
        best = torch.where(is_better, scales, best)
        least = torch.where(is_better, error, least)
    return best
