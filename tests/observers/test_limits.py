"""Beyond its forgetting budget a run does what is configured."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pipeline.checkpoint.position import Position
from pipeline.config.stability import Forgetting
from pipeline.errors import RESUME_LATER, ForgettingError
from pipeline.observers.limits import apply_forgetting_budget
from pipeline.run_folder.attempts import read_attempts
from pipeline.training.observer import ValidationEvent
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, metrics, train

# It learns Korean only, and fast: English is forgotten immediately.
FORGETS: dict[str, Any] = {
    "schedule__steps": 4,
    "schedule__learning_rate": 2e-2,
    "data__replay_fraction": 0.0,
    "validation__every_steps": 1,
}


def test_forgetting_and_the_lowered_rate_survive_resuming_and_a_run_that_must_stop_saves_first(
    tokens, tmp_path
):
    lowers = {**FORGETS, "forgetting": {"max_increase": 1e-4, "action": "lower_learning_rate"}}
    config = make_run(tmp_path / "run", tokens, zero=1, **lowers)
    others = {"undisturbed": lowers, "full": FORGETS}
    others["stops"] = {**FORGETS, "forgetting": {"max_increase": 1e-4, "action": "stop"}}
    others["stops at its end"] = {**others["stops"], "validation__every_steps": 100}
    jobs = [partial(train, config, stop=True), partial(train, config)]
    jobs += [
        partial(train_observed, make_run(tmp_path / name, tokens, zero=1, **own))
        for name, own in others.items()
    ]
    first, second = run_ranks(in_turn, 2, jobs)
    assert (first[:4], second) == (
        [RESUME_LATER, 0, 0, 0],
        [RESUME_LATER, 0, 0, 0, "exit 1", "exit 1"],
    )
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
    assert (tmp_path / "stops" / "seen").read_text() == "1", (
        "the end is on record before a slow tracker's end"
    )
    # Nothing goes on by itself with a model that forgot too much: no gate, no export.
    assert first[5].startswith("ForgettingError: step 4: forgetting/english ")
    latest = tmp_path / "stops at its end" / "checkpoints" / "latest"
    assert latest.read_text().strip() == "step_00000004"


def train_observed(config: Path) -> int:
    """Trains with an observer of rank 0 that writes at its end which exit code is on record."""
    from pipeline import observers
    from pipeline.training.observer import Observer

    class Late(Observer):
        def on_end(self, *, finished: bool) -> None:
            end = read_attempts(config.parent)[-1].end
            (config.parent / "seen").write_text(str(end and end.exit_code))

    make, own = observers.make_observers, [Late()] if os.environ["RANK"] == "0" else []
    with patch.object(observers, "make_observers", lambda trainer: [*make(trainer), *own]):
        return train(config)


@pytest.mark.parametrize("action", ["warn", "stop", "lower_learning_rate"])
def test_the_configured_action(action):
    budget = Forgetting(max_increase=0.1, max_kl_from_base=0.2, action=action)
    within = {"forgetting/english": 0.1, "kl_from_base/english": 0.2, "perplexity/english": 9.0}
    beyond = [
        {"forgetting/english": 0.11},
        {"forgetting/english": math.nan},
        {"kl_from_base/english": 0.3},
    ]
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


def test_the_warning_of_a_run_with_a_gate_says_of_which_model_it_is():
    figures = {"forgetting/english": 46.8}
    gated, plain = run_ranks(_stop_messages, 1, figures)[0]
    assert "forgetting/english 46.8000 is beyond 0.05 for the model without its gate" in gated
    assert "forgetting/english 46.8000 is beyond 0.05; " in plain and "gate" not in plain


def _stop_messages(figures):
    budget = Forgetting(max_increase=0.05, action="stop")
    messages = []
    for has_gate in (True, False):
        event = ValidationEvent(Position(), {}, dict(figures))
        apply_forgetting_budget(event, budget, has_gate=has_gate)
        messages.append(str(event.stop))
    return messages
