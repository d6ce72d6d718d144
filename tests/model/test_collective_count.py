"""How many messages tensor parallelism sends, and how long: Megatron's, with the expansion travelling in the same ones.

Megatron's layer sums twice forward, behind attention and behind the FFN, and twice backward, before them. Below stands
every all-reduce of a step, as its number of elements.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.model.from_hf import open_base
from pipeline.parallel.topology import Layout, ProcessGroups
from tests.distributed import run_ranks
from tests.widened import scale_settings, some_batch, trained_gradients, unwidened, widened

TOKENS = 2 * 24
D, U, LAYERS, HEAD_DIM = 32, 12, 3, 8
BASE, BOTH, UP = TOKENS * D, TOKENS * (D + U), TOKENS * U
# Of each token, the largest logit; then its normaliser and its target's logit; and the router's three sums.
LOSS, ROUTER = [TOKENS, 2 * TOKENS], [3 * TOKENS]
ONE_KV_HEAD = {"expansion": {"hidden_size": U, "intermediate_size": 8, "num_attention_heads": 2}}
SETTINGS = {
    "fft": None,
    "preserve": scale_settings("preserve"),
    "adapt": scale_settings("adapt", l_fp=1),
    "route": scale_settings("route", l_fp=1),
    "replicated": scale_settings("adapt", l_fp=1, **ONE_KV_HEAD),
}
OTHER_COLLECTIVES = ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all", "send")


def messages_of_rank(path: Path) -> dict[str, tuple[list[int], list[int]]]:
    """The lengths of the all-reduces of a forward and of a backward pass, for every method."""
    base = open_base(path)
    tp = ProcessGroups(Layout(dist.get_world_size(), dist.get_world_size())).tensor_parallel
    lengths: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor, *rest, **options):
        lengths.append(tensor.numel())
        return all_reduce(tensor, *rest, **options)

    def refused(*_, **__):
        raise AssertionError("another collective than all_reduce")

    dist.all_reduce = counted
    for name in OTHER_COLLECTIVES:
        setattr(dist, name, refused)
    seen = {}
    for method, settings in SETTINGS.items():
        model = unwidened(base, tp) if settings is None else widened(base, settings, tp=tp)
        lengths.clear()
        loss, *_ = model(*some_batch(model.spec, 2, 24))
        forward = lengths.copy()
        loss.backward()
        assert trained_gradients(model)
        seen[method] = forward, lengths[len(forward) :]
    return seen


@pytest.fixture(scope="module", params=["llama", "neox"])
def messages(request, base):
    """The messages of each method, which every rank must have sent alike, and whether the residual is parallel."""
    first, *others = run_ranks(messages_of_rank, 2, base(request.param).path)
    assert all(other == first for other in others)
    return first, base(request.param).spec.parallel_residual


def test_full_fine_tuning_sends_megatrons_messages(messages):
    """The embedding's sum and two a layer; backward two a layer and the output projection's."""
    assert messages[0]["fft"] == ([BASE] * (1 + 2 * LAYERS) + LOSS, [BASE] * (1 + 2 * LAYERS))


def test_preserve_sends_no_message_more_and_no_base_gradient(messages):
    assert messages[0]["preserve"] == ([BOTH] * (1 + 2 * LAYERS) + LOSS, [UP] * (1 + 2 * LAYERS))


def test_adapt_sends_base_gradients_above_the_first_w12_alone(messages):
    """W12 stands in the attention of layers 1 and 2. Where residuals are parallel, layer 1's FFN reads x before it."""
    sent, parallel_residual = messages
    with_base = 1 + 2 + (0 if parallel_residual else 1)
    expected = [BOTH] * with_base + [UP] * (1 + 2 * LAYERS - with_base)
    assert sent["adapt"] == ([BOTH] * (1 + 2 * LAYERS) + LOSS, expected)


def test_route_sends_a_second_path_above_l_fp_and_the_routers_sums(messages):
    sent, parallel_residual = messages
    forward, backward = sent["route"]
    assert forward == [BOTH] * (1 + 2 + 2 * 2 * (LAYERS - 1)) + ROUTER + LOSS
    with_base = 2 + (0 if parallel_residual else 1)
    output = TOKENS * (D + U + U)
    expected = [output] + [BOTH] * with_base + [UP] * (2 + 2 * 2 * (LAYERS - 1) - with_base)
    assert sorted(backward, reverse=True) == expected


def test_a_shared_key_value_head_adds_the_sums_of_its_weights_gradients_alone(messages):
    """Llama: both ranks hold the one new key/value head, and sum the gradients of its W21 and W22. NeoX: one a rank."""
    sent, is_neox = messages
    forward, backward = sent["replicated"]
    added = [] if is_neox else [HEAD_DIM * D, HEAD_DIM * U] * 2 * LAYERS
    assert forward == sent["adapt"][0]
    assert sorted(backward) == sorted([*sent["adapt"][1], *added])
