"""Runs on a mixture of experts, on two ranks: stopped and resumed, they end to the bit as
undisturbed.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest

from pipeline.errors import RESUME_LATER
from tests.distributed import run_ranks
from tests.extensions.self_generated.helpers import random_base
from tests.training.journeys import METHODS, TRAINS_BASE
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
TP2 = {"parallel__tp_size": 2}
BOTH = {"l_fp": 1, "collaborative_modules": "both"}
RUNS: dict[str, dict[str, Any]] = {
    "preserve": {"zero": 3, "method__norm": "base", "checkpoints__asynchronous": True},
    "adapt": {
        "zero": 1,
        **TP2,
        "parallel__sequence_parallel": True,
        "activation_checkpointing": "all",
    },
    "route": {
        "zero": 3,
        **TP2,
        "activation_checkpointing": "collaborative",
        "data__replay_loss": "kl",
    },
    "lora": {"zero": 2, "base_precision": "nf4"},
    "fft": {
        "zero": 3,
        "schedule__optimizer": "muon",
        "activation_checkpointing": "all",
        "data__replay_loss": "kl",
    },
    "llama_pro": {"zero": 3, "method__added_layers": 1},
    "freeze": {"zero": 2, **TP2, "method__frozen_layers": 1},
}


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory):
    """The folder of all runs, and what the ranks of each undisturbed one held at its end."""
    folder = tmp_path_factory.mktemp("mixture")
    base = str(random_base("qwen3_moe dense layer", folder / "base"))

    def jobs(kind, make, job):
        for method, changes in RUNS.items():
            settings = METHODS[method] | (BOTH if "l_fp" in METHODS[method] else {})
            run = folder / kind / method
            yield partial(
                job, make(run, tokens, base=base, schedule__steps=STEPS, method=settings, **changes)
            )

    found = run_ranks(in_turn, 2, list(jobs("undisturbed", make_run, train_and_look)))
    stopped = run_ranks(in_turn, 2, list(jobs("stopped", make_run, partial(train, stop=True))))
    assert stopped == [[RESUME_LATER] * len(RUNS)] * 2
    shutil.copytree(folder / "stopped", folder / "resumed")
    assert (
        run_ranks(in_turn, 2, list(jobs("resumed", write_config, train))) == [[0] * len(RUNS)] * 2
    )
    return folder, dict(zip(RUNS, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("method", RUNS)
def test_it_resumes_to_the_bit_from_its_base(runs, method):
    folder, held = runs
    undisturbed, resumed = (folder / kind / method for kind in ("undisturbed", "resumed"))
    assert len(losses(folder / "stopped" / method)) == 1
    assert metrics(resumed) == metrics(undisturbed)
    loss = losses(undisturbed)
    assert len(loss) == STEPS and loss[-1] < loss[0]
    for rank in held[method]:
        assert rank["step0_max_abs_logit_difference"] == (None if method in TRAINS_BASE else 0.0)
