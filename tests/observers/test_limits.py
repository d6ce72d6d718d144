"""Beyond its forgetting budget a run does what is configured; a run that learns nothing more is finished."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from pipeline.checkpoint.manifest import Position
from pipeline.config.run import Forgetting, load_config
from pipeline.errors import RESUME_LATER, ForgettingError
from pipeline.observers.limits import EarlyStop, apply_forgetting_budget
from pipeline.run_folder.attempts import read_attempts
from pipeline.run_folder.status import TRAINING, read_status
from pipeline.training.observer import ValidationEvent
from pipeline.training.validation import HeldoutScore
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, metrics, train, write_config

# It learns Korean only, and fast: English is forgotten immediately.
FORGETS: dict[str, Any] = {
    "schedule__steps": 4,
    "schedule__learning_rate": 2e-2,
    "data__replay_fraction": 0.0,
    "validation__every_steps": 1,
}
# It learns nothing, then forgets: at this rate each step raises the loss of new text.
LEARNS_NOTHING: dict[str, Any] = {
    "schedule__steps": 9,
    "schedule__learning_rate": 1.0,
    "stability__loss_increase": None,
    "stability__gradient_norm_factor": None,
    "validation": {"every_steps": 1, "max_sequences": 5, "stop_after": 2},
}


def test_forgetting_and_the_lowered_rate_survive_resuming_and_a_run_that_must_stop_saves_first(tokens, tmp_path):
    lowers = {**FORGETS, "forgetting": {"max_increase": 1e-4, "action": "lower_learning_rate"}}
    config = make_run(tmp_path / "run", tokens, zero=1, **lowers)
    others = {"undisturbed": lowers, "full": FORGETS}
    others["stops"] = {**FORGETS, "forgetting": {"max_increase": 1e-4, "action": "stop"}}
    jobs = [partial(train, config, stop=True), partial(train, config)]
    jobs += [partial(train, make_run(tmp_path / name, tokens, zero=1, **other)) for name, other in others.items()]
    first, second = run_ranks(in_turn, 2, jobs)
    assert (first[:4], second) == ([RESUME_LATER, 0, 0, 0], [RESUME_LATER, 0, 0, 0, "exit 1"])
    found = metrics(tmp_path / "run")
    for line in found[1:]:
        increase = line["perplexity/english"] / found[0]["perplexity/english"] - 1
        assert line["forgetting/english"] == pytest.approx(increase, rel=1e-9)
        assert "forgetting/korean" not in line
    assert found[-1]["perplexity/korean"] < 0.9 * found[0]["perplexity/korean"]  # learnt
    assert found[-1]["forgetting/english"] > 1e-4
    assert found == metrics(tmp_path / "undisturbed")
    assert losses(tmp_path / "run") != losses(tmp_path / "full")

    step = len(losses(tmp_path / "stops"))
    assert step < 4 and first[4].startswith(f"ForgettingError: step {step}: forgetting/english ")
    assert (tmp_path / "stops" / "checkpoints" / "latest").read_text().strip() == f"step_{step:08d}"


@pytest.mark.parametrize("action", ["warn", "stop", "lower_learning_rate"])
def test_the_configured_action(action):
    budget = Forgetting(max_increase=0.1, max_kl_from_base=0.2, action=action)
    within = {"forgetting/english": 0.1, "kl_from_base/english": 0.2, "perplexity/english": 9.0}
    beyond = [{"forgetting/english": 0.11}, {"forgetting/english": math.nan}, {"kl_from_base/english": 0.3}]
    (verdicts,) = run_ranks(_verdicts, 1, budget, [within, *beyond])
    assert verdicts[0] == (Position(), None)
    for position, stop in verdicts[1:]:
        assert position.learning_rate_factor == (0.5 if action == "lower_learning_rate" else 1)
        assert isinstance(stop, ForgettingError) == (action == "stop")


def _verdicts(budget, validations):
    events = [ValidationEvent(Position(), {}, dict(figures)) for figures in validations]
    for event in events:
        apply_forgetting_budget(event, budget)
    return [(event.position, event.stop) for event in events]


def test_a_run_ends_after_validations_without_gain_and_resumes_when_more_are_allowed(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, **LEARNS_NOTHING)
    assert run_ranks(in_turn, 2, [partial(train, config)] * 2) == [[0, 0]] * 2
    curve = [line["perplexity/korean"] for line in metrics(tmp_path)[1:]]
    assert len(losses(tmp_path)) == len(curve) < 9
    assert min(curve[-2:]) >= min(curve[:-2])  # the last two brought no gain, and nothing was trained again
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"step_{len(curve):08d}"
    assert read_status(tmp_path).state == "done"
    [attempt] = read_attempts(tmp_path)
    assert attempt.ended is not None and attempt.ended.exit_code == 0

    (tmp_path / TRAINING).unlink()  # killed before it was written
    assert read_status(tmp_path).state != "done"
    more = partial(train, config, changes=["validation.stop_after=3"])
    assert run_ranks(in_turn, 1, [partial(train, config), more]) == [[0, 0]]
    assert len(losses(tmp_path)) > len(curve)


def test_a_first_loss_that_is_not_a_number_is_no_best(tmp_path):
    observer = EarlyStop(load_config(write_config(tmp_path, tmp_path, validation__stop_after=2)))
    position = Position()
    for loss, without in [(math.nan, 1), (2.0, 0), (3.0, 1), (1.0, 0), (math.nan, 1)]:
        event = ValidationEvent(position, {"korean": HeldoutScore(loss, 1.0)}, {})
        with patch("pipeline.observers.limits.broadcast_from_rank0", lambda work: work()):
            observer.on_validation(event)
        position = event.position
        assert position.validations_without_gain == without
