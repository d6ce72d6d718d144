"""What steers a run is decided once: ranks that see different figures do the same, and end
together.

Ranks may differ where nothing is wrong: another kind of GPU rounds otherwise, and a figure next to
its limit is beyond it on some ranks only. If each decided for itself, learning rates would part in
silence, or a rank would wait forever for one that has ended.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import PropertyMock, patch

import torch

from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, prepared, start_deepspeed, trained

STEPS = 3
LIMIT = 0.5
BEYOND, WITHIN = 0.6, 0.4
ONLY_RANK_0 = (BEYOND, WITHIN)
ONLY_RANK_1 = (WITHIN, BEYOND)


class Seen(NamedTuple):
    """What a rank did: the factor of the learning rate after each validation, and where the run
    ended.
    """

    factors: list[float]
    steps: int
    skipped: tuple[int, ...]
    weights: float
    """the sum of all trained weights after the last step"""


def budget(action: str) -> dict[str, Any]:
    return {"forgetting": {"max_kl_from_base": LIMIT, "action": action}}


def run_in(folder: Path, tokens: Path, **changes: Any) -> Path:
    return make_run(
        folder, tokens, zero=1, schedule__steps=STEPS, validation__every_steps=1, **changes
    )


def train_seeing(config: Path, own_kl: tuple[float, float], *, unapplied: bool = False) -> Seen:
    """Trains while each rank measures its `own_kl`; `unapplied`: rank 1 believes that no step
    changed the weights.
    """
    start_deepspeed()
    from pipeline.observers.drift import Drift
    from pipeline.training.engine import Engine
    from pipeline.training.observer import Observer, ValidationEvent

    rank = int(os.environ["RANK"])
    factors: list[float] = []

    class Recorder(Observer):
        def on_validation(self, event: ValidationEvent) -> None:
            factors.append(event.position.learning_rate_factor)

    def measure(_: Drift, event: ValidationEvent) -> None:
        event.figures["kl_from_base/english"] = own_kl[rank]

    with ExitStack() as patches:
        patches.enter_context(patch.object(Drift, "on_validation", measure))
        if unapplied and rank == 1:
            never = PropertyMock(return_value=False)
            patches.enter_context(patch.object(Engine, "step_applied", never))
        trainer = prepared(config)
        trainer.observers.append(Recorder())
        trained(trainer)
    weights = sum(
        float(parameter.detach().double().sum()) for parameter in trainer.engine.model.parameters()
    )
    assert torch.isfinite(torch.tensor(weights))
    return Seen(factors, trainer.position.step, trainer.position.skipped_steps, weights)


def test_rank_0s_figures_decide_for_all(tokens, tmp_path):
    """Every other rank's own figures would have decided otherwise."""
    jobs = {
        "lowers": partial(
            train_seeing,
            run_in(tmp_path / "a", tokens, **budget("lower_learning_rate")),
            ONLY_RANK_0,
        ),
        "keeps": partial(
            train_seeing,
            run_in(tmp_path / "b", tokens, **budget("lower_learning_rate")),
            ONLY_RANK_1,
        ),
        "goes on": partial(
            train_seeing, run_in(tmp_path / "c", tokens, **budget("stop")), ONLY_RANK_1
        ),
        "applies": partial(
            train_seeing, run_in(tmp_path / "d", tokens), (WITHIN, WITHIN), unapplied=True
        ),
        "stops": partial(
            train_seeing, run_in(tmp_path / "e", tokens, **budget("stop")), ONLY_RANK_0
        ),
    }
    of_rank_0, of_rank_1 = run_ranks(in_turn, 2, list(jobs.values()))
    first, second = (dict(zip(jobs, results, strict=True)) for results in (of_rank_0, of_rank_1))

    assert first.pop("stops").startswith(
        "ForgettingError: step 1: kl_from_base/english 0.6000 is beyond 0.5"
    )
    assert second.pop("stops") == "exit 1"
    assert (tmp_path / "e" / "checkpoints" / "latest").read_text().strip() == "step_00000001"

    assert first == second
    assert first["lowers"].factors == [0.5, 0.25, 0.125]
    assert first["keeps"].factors == [1.0] * STEPS
    assert first["lowers"].weights != first["keeps"].weights
    for name in ("keeps", "goes on", "applies"):
        assert (first[name].steps, first[name].skipped) == (STEPS, ()), name
