"""The arithmetic of ZeRO's flat tensors: what was cut is reassembled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.checkpoint.reader import Fragments, stage_1_2_fragments, stage_3_fragments

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def parameters(sizes: list[int]) -> dict[str, Tensor]:
    return {f"p{index}": torch.arange(size) + 1000 * index for index, size in enumerate(sizes)}


def assemble(fragments: Fragments, flats: list[list[Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.cat([flats[run.dp_rank][run.group][run.start : run.start + run.length] for run in runs])
        for name, runs in fragments.items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@given(SIZES, st.integers(1, 5), st.integers(1, 3))
def test_stage_3_pads_and_cuts_every_parameter(sizes, dp_size, per_group):
    values = parameters(sizes)
    pieces = {
        name: torch.nn.functional.pad(tensor, (0, -len(tensor) % dp_size), value=-1).chunk(dp_size)
        for name, tensor in values.items()
    }
    names = list(values)
    groups = [names[at : at + per_group] for at in range(0, len(names), per_group)]
    flats = [[torch.cat([pieces[name][rank] for name in group]) for group in groups] for rank in range(dp_size)]
    group_sizes = [len(flat) for flat in flats[0]]

    fragments = stage_3_fragments({name: len(tensor) for name, tensor in values.items()}, group_sizes, dp_size)

    assert_same(assemble(fragments, flats), values)


@given(SIZES, st.integers(1, 5))
def test_stages_1_and_2_cut_the_joined_parameters_once(sizes, dp_size):
    values = parameters(sizes)
    joined = torch.cat(list(values.values()))
    joined = torch.nn.functional.pad(joined, (0, -len(joined) % (2 * dp_size)), value=-1)
    length = len(joined) // dp_size
    slices: list[list[dict[str, SimpleNamespace]]] = [[{}] for _ in range(dp_size)]
    at = 0
    for name, tensor in values.items():
        for rank in range(dp_size):
            first, stop = max(at, rank * length), min(at + len(tensor), (rank + 1) * length)
            if first < stop:
                slices[rank][0][name] = SimpleNamespace(start=first - rank * length, numel=stop - first)
        at += len(tensor)

    fragments = stage_1_2_fragments(slices)

    assert_same(assemble(fragments, [[flat] for flat in joined.split(length)]), values)


def test_stage_3_refuses_flat_tensors_of_another_number_of_ranks():
    sizes = {"a": 10, "b": 6}
    stage_3_fragments(sizes, [8], 2)
    with pytest.raises(ValueError, match=r"8 elements"):
        stage_3_fragments(sizes, [8], 4)
    with pytest.raises(ValueError, match="fit"):
        stage_3_fragments(sizes, [8], 1)
