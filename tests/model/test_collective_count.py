"""How many messages tensor parallelism sends, and how long: Megatron's, with the expansion
travelling
in the same ones.

Megatron's layer sums twice forward, behind attention and behind the FFN, and twice backward, before
them. Below stands every all-reduce of a step, as its number of elements; and the halves that
sequence parallelism makes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from benchmarks.messages import Messages
from pipeline.model.from_hf import open_base
from pipeline.parallel.topology import Layout, ProcessGroups
from tests.distributed import run_ranks
from tests.widened import scale_settings, some_batch, trained_gradients, unwidened, widened

pytestmark = pytest.mark.full

TOKENS = 2 * 24
D = 32
U = 12
LAYERS = 3
HEAD_DIM = 8
# The streams of all tokens: the base's, both, the expansion's.
BASE = TOKENS * D
BOTH = TOKENS * (D + U)
UP = TOKENS * U
LOSS = [TOKENS, 2 * TOKENS]
"""Of each token the largest logit; then its normaliser and its target's logit."""
ROUTER = [3 * TOKENS]
"""Of each token the three sums of a cosine similarity."""
ONE_KV_HEAD = {"expansion": {"hidden_size": U, "intermediate_size": 8, "num_attention_heads": 2}}
RANK = 2
OWN = {"open_rows": {"min_count": 1}, "open_gains": True, "low_rank": RANK}
OWN_ROWS = 50 * D
"""The gradient of own output rows: one for every other token of 97, and one for all others."""
SETTINGS = {
    "fft": None,
    "preserve": scale_settings("preserve"),
    "adapt": scale_settings("adapt", l_fp=1),
    "route": scale_settings("route", l_fp=1),
    "replicated": scale_settings("adapt", l_fp=1, **ONE_KV_HEAD),
    "open weights": scale_settings("adapt", l_fp=1, **OWN),
}
ALL_REDUCE = "allreduce"
GATHER = "allgather_base"
SCATTER = "reduce_scatter_base"
FORWARD = 0
BACKWARD = 1
Sent = dict[str, tuple[list[int], list[int]]]
"""By collective, the lengths of a forward and of a backward pass."""


class Sendings(NamedTuple):
    """By method, the all-reduces of ranks that hold all positions, and what ranks send that hold
    their own alone."""

    whole: dict[str, tuple[list[int], list[int]]]
    split: dict[str, Sent]
    parallel_residual: bool


def messages_of_rank(path: Path, sequence_parallel: bool) -> dict[str, Sent]:
    """What each method sends."""
    base = open_base(path)
    layout = Layout(dist.get_world_size(), dist.get_world_size())
    tp = ProcessGroups(layout, sequence_parallel=sequence_parallel).tensor_parallel
    seen = {}
    for method, settings in SETTINGS.items():
        model = unwidened(base, tp) if settings is None else widened(base, settings, tp=tp)
        with Messages() as forward:
            loss, *_ = model(*some_batch(model.spec, 2, 24))
        with Messages() as backward:
            loss.backward()
        assert trained_gradients(model)
        seen[method] = {}
        for collective in {name for name, *_ in forward.sent + backward.sent}:
            both = (lengths(forward, collective), lengths(backward, collective))
            seen[method][collective] = both
    return seen


def lengths(messages: Messages, collective: str) -> list[int]:
    """In elements, the longer of what is given and got."""
    elements = []
    for name, sent_bytes, _ in messages.sent:
        if name == collective:
            elements.append(sent_bytes // torch.float32.itemsize)
    return elements


@pytest.fixture(scope="module", params=["llama", "neox"])
def messages(request, base):
    """The messages of each method, which every rank must have sent alike."""
    llama_or_neox = base(request.param)
    whole = of_all_ranks(llama_or_neox.path, sequence_parallel=False)
    split = of_all_ranks(llama_or_neox.path, sequence_parallel=True)
    for sent in whole.values():
        assert sent.keys() == {ALL_REDUCE}, "another collective than all-reduce"
    for sent in split.values():
        assert sent.keys() == {ALL_REDUCE, GATHER, SCATTER}
    all_reduced = {method: sent[ALL_REDUCE] for method, sent in whole.items()}
    return Sendings(all_reduced, split, llama_or_neox.spec.parallel_residual)


def of_all_ranks(path: Path, sequence_parallel: bool) -> dict[str, Sent]:
    first, *others = run_ranks(messages_of_rank, 2, path, sequence_parallel)
    assert all(other == first for other in others)
    return first


def test_full_fine_tuning_sends_megatrons_messages_and_scale_no_more(messages):
    """The embedding's sum and two a layer; backward two a layer and the output projection's.

    Preserve sends no base gradient, Adapt only above the first W12: in the attention of layers 1
    and 2. Where residuals are parallel, layer 1's FFN reads x before it.
    """
    sums = 1 + 2 * LAYERS
    with_base = 4 - messages.parallel_residual
    assert messages.whole["fft"] == ([BASE] * sums + LOSS, [BASE] * sums)
    assert messages.whole["preserve"] == ([BOTH] * sums + LOSS, [UP] * sums)
    assert messages.whole["adapt"] == (
        [BOTH] * sums + LOSS,
        [BOTH] * with_base + [UP] * (sums - with_base),
    )


def test_route_sends_a_second_path_above_l_fp_and_the_routers_sums(messages):
    forward, backward = messages.whole["route"]
    assert forward == [BOTH] * (1 + 2 + 2 * 2 * (LAYERS - 1)) + ROUTER + LOSS
    with_base = 3 - messages.parallel_residual
    output = TOKENS * (D + U + U)
    expected = [output] + [BOTH] * with_base + [UP] * (2 + 2 * 2 * (LAYERS - 1) - with_base)
    assert sorted(backward, reverse=True) == expected


def test_a_shared_key_value_head_adds_the_sums_of_its_weights_gradients_alone(messages):
    """Llama: both ranks hold the one new key/value head, and sum the gradients of its W21 and W22.
    NeoX: one a rank."""
    forward, backward = messages.whole["replicated"]
    added = [] if messages.parallel_residual else [HEAD_DIM * D, HEAD_DIM * U] * 2 * LAYERS
    assert forward == messages.whole["adapt"][0]
    assert sorted(backward) == sorted([*messages.whole["adapt"][1], *added])


def test_own_weights_send_their_input_rows_and_the_gradients_of_what_is_replicated(messages):
    """Forward the sum of the input's own rows, from which on x is trained: here from layer 1.

    Backward the gradient of the output's own rows, and of A or B of each map of two layers.
    """
    forward, backward = messages.whole["open weights"]
    assert forward == [BOTH, BASE, *messages.whole["adapt"][0][1:]]
    # Llama's FFN has a gate, GPT-NeoX's has none.
    maps = 6 if messages.parallel_residual else 7
    of_adapters = [RANK * D] * maps * 2
    expected = [BOTH] * 5 + [UP] * 2 + [OWN_ROWS] + of_adapters
    assert sorted(backward) == sorted(expected)


@pytest.mark.parametrize("method", SETTINGS)
def test_sequence_parallel_ranks_send_an_all_reduce_in_two_halves(messages, method):
    """A reduce-scatter on leaving a region and an all-gather on entering the next; backward the
    other way round.

    Between embedding and output projection there are as many entrances as exits. Route leaves the
    embedding once and enters the output projection twice; there one of the two base streams has no
    gradient. The own rows of the input are gathered by no region of their own, and x has no
    gradient below them.
    """
    split = messages.split[method]
    # What is gathered more than scattered, in elements.
    more_gathered = {"route": (BOTH, -UP), "open weights": (-BASE, 0)}.get(method, (0, 0))
    for direction in (FORWARD, BACKWARD):
        # Streams of all tokens: not the sums of the loss and the router, nor replicated gradients.
        of_regions = []
        for length in messages.whole[method][direction]:
            if length >= UP and length not in [*LOSS, *ROUTER, OWN_ROWS]:
                of_regions.append(length)
        assert sorted(split[SCATTER][direction]) == sorted(of_regions)
        gathered = sum(of_regions) + more_gathered[direction]
        assert sum(split[GATHER][direction]) == gathered
