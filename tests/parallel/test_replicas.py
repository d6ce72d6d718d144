"""Data-parallel ranks that read other bits of a frozen base do not train."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.errors import BaseModelError
from pipeline.parallel import replicas
from pipeline.parallel.replicas import check_frozen_replicas, checksum
from tests.distributed import run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_depends_on_every_bit_and_its_place(dtype, monkeypatch):
    monkeypatch.setattr(replicas, "_CHUNK", 16)
    values = torch.arange(1, 7 * 11 + 1).to(dtype).view(7, 11)
    seen = {checksum(values).item()}
    octets = values.flatten().view(torch.uint8)
    for place in range(len(octets)):
        for bit in range(8):
            octets[place] ^= 1 << bit
            seen.add(checksum(values).item())
            octets[place] ^= 1 << bit
    seen.add(checksum(values.flip(0)).item())
    seen.add(checksum(values.flip(1)).item())
    assert len(seen) == 1 + 8 * len(octets) + 2
    assert checksum(values.t().contiguous().t()) == checksum(values)
    assert checksum(values[:0]) == 0


def outcome(flipped: int | None, changed: str = "weight") -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    model[1].requires_grad_(False)
    model[1].register_buffer("bias_of_scores", torch.full((3, 3), 0.5))
    model[1].register_buffer("computed", torch.full((3, 3), 0.5), persistent=False)
    if dist.get_rank() == flipped:
        values = getattr(model[1], changed).data
        values[2, 1] = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))
    # What trains may differ here: DeepSpeed broadcasts it.
    model[0].weight.data += dist.get_rank()
    try:
        check_frozen_replicas(model, dist.group.WORLD)
    except BaseModelError as error:
        return str(error)
    except SystemExit as end:
        return f"exit {end.code}"
    return "equal"


def outcomes() -> list[str]:
    return [outcome(None), outcome(1, "computed"), outcome(1), outcome(1, "bias_of_scores")]


def test_a_single_bit_stops_all_ranks_and_the_fault_names_the_one_that_differs():
    first, second = run_ranks(outcomes, 2)
    assert first == ["equal", "equal", "exit 1", "exit 1"]
    assert second[:2] == ["equal", "equal"]
    for fault in second[2:]:
        assert fault.startswith("rank 1 on ") and "copy it there again" in fault
