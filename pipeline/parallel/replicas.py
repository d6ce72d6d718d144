"""Comparison of the frozen parameters and the buffers that data-parallel ranks hold alike.

Each rank reads the base from files of its own node. DeepSpeed would broadcast them from one rank
all the same: the whole base. Comparing checksums costs a pass over the memory and 32 bytes a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.errors import BaseModelError
from pipeline.parallel.parameters import partition_of, zero_partition_of
from pipeline.parallel.ranks import all_gathered, run_on_all_ranks

_CHUNK = 2**18
"""Words that are summed at a time: their 64-bit products stay in a processor's cache."""
_FACTOR = 6364136223846793005
"""Of Knuth's linear congruential generator; odd, so that multiplying by it loses no bit."""


def check_frozen_replicas(model: nn.Module, group: dist.ProcessGroup, expert_size: int = 1) -> None:
    """Checks that all ranks of the data-parallel `group` hold the same bits of what is frozen.

    Where `expert_size` neighbours share experts, those of a rank are compared with the ranks that
    hold the same ones.

    That is every frozen parameter, and every persistent buffer: of some mixtures the correction of
    the router's scores is one. Under ZeRO-3 each rank holds a part of its own of the parameters,
    and the buffers alone, whole on each rank, are compared. Every rank of the world must call it.

    Raises:
        BaseModelError: on the lowest rank that differs from the first of its group. The other ranks
            raise SystemExit.
    """
    if dist.get_world_size(group) == 1:
        return
    frozen: list[Tensor] = []
    experts: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad or zero_partition_of(parameter) is not None:
            continue
        if partition_of(parameter).expert_size > 1:
            experts.append(parameter)
        else:
            frozen.append(parameter)
    frozen += _persistent_buffers(model)
    digests = all_gathered((digest_of(frozen), digest_of(experts)), group)
    run_on_all_ranks(partial(_check_own, digests, dist.get_rank(group), expert_size))


def _persistent_buffers(model: nn.Module) -> Iterator[Tensor]:
    """The buffers that a state_dict holds; others are computed, not read from a file."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer


def _check_own(digests: list[tuple[bytes, bytes]], rank: int, expert_size: int) -> None:
    frozen, experts = digests[rank]
    of_all, _ = digests[0]
    # Of consecutive ranks each holds other experts: the first one with the same is in the first
    # `expert_size`.
    _, of_same_experts = digests[rank % expert_size]
    if frozen != of_all or experts != of_same_experts:
        raise BaseModelError(
            "the base in this rank's memory is not that of the first rank with its shard; remove "
            "the base from this node and copy it there again, and if that does not help, leave the "
            "node out"
        )


def digest_of(tensors: Iterable[Tensor]) -> bytes:
    """A digest of the bits of `tensors`, in their order; the host waits once for the device."""
    checksums = [checksum(tensor) for tensor in tensors]
    if not checksums:
        return b""
    values = torch.stack(checksums).cpu()
    return hashlib.sha256(values.numpy().tobytes()).digest()


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """A number that depends on each bit of `tensor` and on its place: int64, on its device.

    It guards against faults, not against forgery: all sums are modulo 2^64, in any order.
    """
    octets = tensor.detach().contiguous().flatten().view(torch.uint8)
    aligned = len(octets) // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Odd factors: a changed word always changes its product.
    factors = 2 * torch.arange(_CHUNK, device=tensor.device) + 1
    for words in (octets[:aligned].view(torch.int32), octets[aligned:]):
        for chunk in words.split(_CHUNK):
            total = total * _FACTOR + (chunk * factors[: len(chunk)]).sum()
    return total
