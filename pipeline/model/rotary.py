"""Rotary position embedding: the tables of cos and sin that queries and keys are rotated by."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.model.attention import Documents
from pipeline.model.spec import RotarySpec
from pipeline.scale_math import frequencies_by_length, rotary_table, rotate


class RotaryTable:
    """cos and sin of the angles at given positions, each [(B,) S, 1, R].

    R channels of a head are rotated.
    """

    def __init__(
        self, frequencies: Tensor, positions: Tensor, factor: float, dtype: torch.dtype
    ) -> None:
        """Makes the table in `dtype`.

        frequencies: [R / 2], or each token's own [..., R / 2]; positions: [B, S] or [S]; `factor`
        multiplies cos and sin.
        """
        cos, sin = rotary_table(frequencies, positions, factor, dtype)
        self.cos = cos.unsqueeze(-2)
        self.sin = sin.unsqueeze(-2)

    def rotate(self, heads: Tensor) -> Tensor:
        """heads: [B, S, H, K] -> the same shape; the channels beyond R stay unchanged."""
        return rotate(heads, self.cos, self.sin)


class RotaryEmbedding:
    """Makes the rotary tables of a decoder. Base and added heads use the same ones.

    The frequencies are copied to the device once: a copy for every batch would make the host wait
    for the GPU. They are not a buffer, because DeepSpeed would cast a buffer to 16 bits.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}

    def table(
        self, spec: RotarySpec, positions: Tensor, documents: Documents | None, dtype: torch.dtype
    ) -> RotaryTable:
        """The table in `dtype` for positions: [B, S] or [S]."""
        frequencies = self._on_device(spec.frequencies, positions.device)
        if spec.context is not None and spec.long_frequencies is not None:
            long_frequencies = self._on_device(spec.long_frequencies, positions.device)
            lengths = text_lengths(positions, documents)
            frequencies = frequencies_by_length(
                lengths, spec.context, frequencies, long_frequencies
            )
        return RotaryTable(frequencies, positions, spec.attention_factor, dtype)

    def _on_device(self, numbers: tuple[float, ...], device: torch.device) -> Tensor:
        key = (numbers, device)
        if key not in self._held:
            # On the host first, whatever the default device is: under `torch.device("meta")` the
            # numbers would be lost.
            on_host = torch.tensor(numbers, dtype=torch.float32, device="cpu")
            self._held[key] = on_host.to(device)
        return self._held[key]


def text_lengths(positions: Tensor, documents: Documents | None) -> Tensor:
    """The length of the text to which each token belongs: its document [B, S], or its row [B, 1].

    positions: [B, S], or [S] (then a row's length is [1]).
    """
    if documents is None:
        return positions.amax(-1, keepdim=True) + 1
    ids = documents.ids
    starts = documents.starts.long()
    # The position of a document's last token, plus 1, is its length.
    last_tokens = starts[1:] - 1
    lengths = positions.expand_as(ids).flatten()[last_tokens] + 1
    # With the size of the result known, the host does not wait for the GPU.
    of_tokens = lengths.repeat_interleave(starts.diff(), output_size=ids.numel())
    return of_tokens.view_as(ids)
