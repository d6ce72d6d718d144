"""The estimate beside what a real step of DeepSpeed holds and sends, within 5 %."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from tests.distributed import run_ranks
from tests.sizing.real_runs import run_config, step_on_rank

CASES = [
    ("zero1", "adapt", Layout(2), {}),
    ("zero1", "fft", Layout(2, 2), {}),
    ("zero1 fp32", "adapt", Layout(2), {}),
    ("zero2", "route", Layout(2), {}),
    ("zero2", "adapt", Layout(2, 2), {"parallel__sequence_parallel": True}),
    ("zero3", "adapt", Layout(2), {}),
    ("zero3 tight", "preserve", Layout(2), {}),
    ("zero3 tight", "llama_pro", Layout(2), {}),
    ("zero3 tight", "lora", Layout(2), {}),
    ("zero1", "lora", Layout(2, 2), {}),
    ("zero3 tight", "adapt", Layout(2), {"activation_checkpointing": "all"}),
    ("zero3 fp32", "route", Layout(4, 2), {}),
]
COLLECTIVES = {"all-gather": "allgather_base", "reduce-scatter": "reduce_scatter_base", "all-reduce": "allreduce"}
CLOSE = 0.05


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, {case[1]}, tp {case[2].tp_size}")
def case(request, tmp_path_factory):
    """The estimate of a run, and what its ranks found."""
    zero, method, layout, changes = request.param
    config = run_config(tmp_path_factory.mktemp("run"), zero, method, layout, **changes)
    estimator = open_estimator(config, Cluster(gpus=layout.world_size))
    return estimator.estimate(estimator.own_choice), estimator, run_ranks(step_on_rank, layout.world_size, config)


@pytest.mark.parametrize("kind", ["weights", "gradients", "optimizer"])
def test_what_every_rank_holds(case, kind):
    estimate, _, ranks = case
    for rank in ranks:
        assert rank["held"][kind] > 0
        assert getattr(estimate.memory, kind) == pytest.approx(rank["held"][kind], rel=CLOSE)


def test_the_optimizer_covers_what_trains_and_nothing_else(case):
    _, estimator, ranks = case
    if estimator.config.parallel.tp_size == 1:
        held = sum(rank["held"]["adam_elements"] for rank in ranks)
        assert held == pytest.approx(2 * estimator.parameters.trained, rel=0.01)


def test_what_a_step_sends(case):
    """Payloads by collective and group size; the norm's and the loss's few bytes aside."""
    estimate, _, ranks = case
    expected = Counter()
    for traffic in estimate.traffic:
        expected[COLLECTIVES[traffic.collective], traffic.group_size] += traffic.payload_bytes
    assert expected
    for rank in ranks:
        found = Counter()
        for name, length, group_size in rank["messages"]:
            if group_size > 1:
                found[name, group_size] += length
        assert {kind for kind, length in found.items() if length > 1000} == expected.keys()
        for kind, length in expected.items():
            assert length == pytest.approx(found[kind], rel=CLOSE), kind
