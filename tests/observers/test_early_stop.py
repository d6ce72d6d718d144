"""A run that learns nothing more is finished: on all ranks, for good, and again after a kill."""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import patch

import pytest
import yaml

from pipeline.checkpoint.manifest import Position
from pipeline.config.run import load_config
from pipeline.observers.early_stop import EarlyStop
from pipeline.run_folder.attempts import read_attempts
from pipeline.run_folder.status import TRAINING, read_status
from pipeline.training.observer import ValidationEvent
from pipeline.training.validation import HeldoutScore
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, metrics, train, write_config

# It learns nothing, then forgets: at this rate each step raises the loss of new text.
SETTINGS = {
    "schedule__steps": 9,
    "schedule__learning_rate": 1.0,
    "stability__loss_increase": None,
    "stability__gradient_norm_factor": None,
    "validation": {"every_steps": 1, "max_sequences": 5, "stop_after": 2},
}


def test_it_ends_after_validations_without_gain_and_resumes_when_more_are_allowed(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, **SETTINGS)
    [first, second] = run_ranks(in_turn, 2, [partial(train, config)] * 2)
    assert first == second == [0, 0]
    found = metrics(tmp_path)
    curve = [line["perplexity/korean"] for line in found[1:]]
    assert len(losses(tmp_path)) == len(curve) < 9
    assert min(curve[-2:]) >= min(curve[:-2])  # the last two brought no gain, and nothing was trained again
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"step_{len(curve):08d}"
    assert read_status(tmp_path).state == "done"
    [attempt] = read_attempts(tmp_path)
    assert attempt.ended is not None and attempt.ended.exit_code == 0

    (tmp_path / TRAINING).unlink()  # killed before it was written
    assert read_status(tmp_path).state != "done"
    values = yaml.safe_load(config.read_text())
    values["validation"]["stop_after"] = 3
    more = tmp_path / "more.yaml"
    more.write_text(yaml.safe_dump(values))
    assert run_ranks(in_turn, 1, [partial(train, config), partial(train, more)]) == [[0, 0]]
    assert len(losses(tmp_path)) > len(curve)


def test_a_first_loss_that_is_not_a_number_is_no_best(tmp_path):
    observer = EarlyStop(load_config(write_config(tmp_path, tmp_path, validation__stop_after=2)))
    position = Position()
    for loss, without in [(math.nan, 1), (2.0, 0), (3.0, 1), (1.0, 0), (math.nan, 1)]:
        event = ValidationEvent(position, {"korean": HeldoutScore(loss, 1.0)}, {})
        with patch("pipeline.observers.early_stop.broadcast_from_rank0", lambda work: work()):
            observer.on_validation(event)
        position = event.position
        assert position.validations_without_gain == without


@pytest.mark.parametrize("stop_after", [None, 50])
def test_without_a_limit_it_reaches_its_last_step(tokens, tmp_path, stop_after):
    settings = {**SETTINGS, "schedule__steps": 4, "validation": {"every_steps": 1, "stop_after": stop_after}}
    assert run_ranks(train, 1, make_run(tmp_path, tokens, zero=1, **settings)) == [0]
    assert len(losses(tmp_path)) == 4
