"""Runs whose open tokens have weights of their own, on two ranks: stopped and resumed, they end to
the bit as undisturbed.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest

from pipeline.errors import RESUME_LATER
from tests.distributed import run_ranks
from tests.training.journeys import METHODS
from tests.training.runs import (
    in_turn,
    losses,
    make_run,
    metrics,
    train,
    train_and_look,
    write_config,
)

pytestmark = pytest.mark.full

STEPS = 3
OWN = {"own_rows": {"min_count": 5}, "own_gains": True, "low_rank": 4}
PRESERVE = METHODS["preserve"] | OWN | {"own_first_layer": 1}
ADAPT = METHODS["adapt"] | OWN
RUNS: dict[str, dict[str, Any]] = {
    "preserve, ZeRO-2, fp8, muon, KL": {
        "zero": 2,
        "method": PRESERVE,
        "base_precision": "fp8",
        "schedule__optimizer": "muon",
        "data__replay_loss": "kl",
    },
    "adapt, ZeRO-3, recomputing, asynchronous": {
        "zero": 3,
        "method": ADAPT,
        "activation_checkpointing": "all",
        "checkpoints__asynchronous": True,
    },
    "adapt, ZeRO-1, nf4": {"zero": 1, "method": ADAPT | {"norm": "base"}, "base_precision": "nf4"},
    "adapt, sequence parallel": {
        "zero": 1,
        "method": ADAPT,
        "parallel__tp_size": 2,
        "parallel__sequence_parallel": True,
    },
}


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory):
    """The folder of all runs, and what the ranks of each undisturbed one held at its end."""
    folder = tmp_path_factory.mktemp("own")

    def jobs(kind, make, job):
        for name, changes in RUNS.items():
            run = folder / kind / name.replace(", ", "_").replace(" ", "_")
            yield partial(job, make(run, tokens, gate={}, schedule__steps=STEPS, **changes))

    found = run_ranks(in_turn, 2, list(jobs("undisturbed", make_run, train_and_look)))
    stopped = run_ranks(in_turn, 2, list(jobs("stopped", make_run, partial(train, stop=True))))
    assert stopped == [[RESUME_LATER] * len(RUNS)] * 2
    shutil.copytree(folder / "stopped", folder / "resumed")
    resumed = run_ranks(in_turn, 2, list(jobs("resumed", write_config, train)))
    assert resumed == [[0] * len(RUNS)] * 2
    return folder, dict(zip(RUNS, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_it_resumes_to_the_bit(runs, name):
    folder, held = runs
    run = name.replace(", ", "_").replace(" ", "_")
    undisturbed, resumed = (folder / kind / run for kind in ("undisturbed", "resumed"))
    assert len(losses(folder / "stopped" / run)) == 1
    assert metrics(resumed) == metrics(undisturbed)
    loss = losses(undisturbed)
    assert len(loss) == STEPS and loss[-1] < loss[0]
    for rank in held[name]:
        assert rank["step0_max_abs_logit_difference"] == 0.0
