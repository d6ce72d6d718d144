"""Forgetting is measured from step 0 over all attempts, and beyond its budget the configured action follows."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.checkpoint.manifest import Position
from pipeline.config.run import Forgetting
from pipeline.errors import RESUME_LATER, ForgettingError
from pipeline.observers.forgetting import apply_forgetting_budget
from pipeline.training.observer import ValidationEvent
from tests.distributed import RankError, run_ranks
from tests.training.runs import losses, make_run, metrics, train, train_each

# It learns Korean only, and fast: English is forgotten immediately.
SETTINGS: dict[str, Any] = {
    "schedule__steps": 4,
    "schedule__learning_rate": 2e-2,
    "data__replay_fraction": 0.0,
    "validation__every_steps": 1,
}


def test_the_figure_and_the_lowered_rate_survive_resuming(tokens, tmp_path):
    settings = {**SETTINGS, "forgetting": {"max_increase": 1e-4, "action": "lower_learning_rate"}}
    config = make_run(tmp_path / "run", tokens, zero=1, **settings)
    undisturbed = make_run(tmp_path / "undisturbed", tokens, zero=1, **settings)
    at_full_rate = make_run(tmp_path / "full", tokens, zero=1, **SETTINGS)
    codes = run_ranks(_train, 2, [config, config, undisturbed, at_full_rate])
    assert codes == [[RESUME_LATER, 0, 0, 0]] * 2
    found = metrics(tmp_path / "run")
    for line in found[1:]:
        increase = line["perplexity/english"] / found[0]["perplexity/english"] - 1
        assert line["forgetting/english"] == pytest.approx(increase, rel=1e-9)
        assert "forgetting/korean" not in line
    assert found[-1]["perplexity/korean"] < 0.9 * found[0]["perplexity/korean"]  # learnt
    assert found[-1]["forgetting/english"] > 1e-4

    assert found == metrics(tmp_path / "undisturbed")
    assert losses(tmp_path / "run") != losses(tmp_path / "full")


def _train(configs):
    return train_each(configs, stop_first=True)


def test_a_run_that_must_stop_saves_first(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, **SETTINGS, forgetting={"max_increase": 1e-4, "action": "stop"})
    with pytest.raises(
        RankError, match=r"ForgettingError: step \d: forgetting/english .* is beyond 0.0001; this step is"
    ):
        run_ranks(train, 2, config)
    step = len(losses(tmp_path))
    assert step < 4
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"step_{step:08d}"


@pytest.mark.parametrize("action", ["warn", "stop", "lower_learning_rate"])
def test_the_configured_action(action):
    budget = Forgetting(max_increase=0.1, max_kl_from_base=0.2, action=action)
    within = {"forgetting/english": 0.1, "kl_from_base/english": 0.2, "perplexity/english": 9.0}
    beyond = [{"forgetting/english": 0.11}, {"forgetting/english": float("nan")}, {"kl_from_base/english": 0.3}]
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
