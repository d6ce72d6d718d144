"""Tasks of lm-eval during training have the values that its own Hugging Face model gives, at every layout."""

from __future__ import annotations

from functools import partial

import pytest

from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.evaluation.benchmarks import load_tasks, run_benchmarks
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.evaluation.task_files import write_task_files
from tests.observers.test_limits import LEARNS_NOTHING
from tests.training.runs import in_turn, make_run, metrics, prepared, train, write_config

TASKS = ["copa", "passive_1", "arc"]  # the last is neither all right nor all wrong


def scored(config):
    """The tasks' figures before any step, when the model equals its base."""
    trainer = prepared(config)
    from pipeline.checkpoint.manifest import Position
    from pipeline.observers.tasks import TaskScores
    from pipeline.training.observer import ValidationEvent

    [tasks] = [observer for observer in trainer.observers if isinstance(observer, TaskScores)]
    event = ValidationEvent(Position(), {})
    tasks.on_validation(event)
    return event.figures


def test_the_figures_are_those_of_an_export(tokens, tmp_path):
    data = write_task_files(tmp_path / "data")
    settings = {"tasks": TASKS, "tasks_include": str(data), "tasks_limit": 8}
    configs = [
        make_run(tmp_path / str(tp_size), tokens, zero=1, parallel__tp_size=tp_size, validation=settings)
        for tp_size in (1, 2)
    ]
    results = run_benchmarks(STORIES, load_tasks(TASKS, include=data, limit=8))
    expected = {f"{result.metric}/{result.task}": result.value for result in results}
    assert {"acc/copa", "acc/passive_1", "acc/average"} <= expected.keys()
    for found in run_ranks(in_turn, 2, [partial(scored, config) for config in configs]):
        assert found == [pytest.approx(expected)] * 2


NEVER = {**LEARNS_NOTHING, "validation": {**LEARNS_NOTHING["validation"], "tasks_every": 50}}
ENDS = {"early stop": NEVER, "budget": {**NEVER, "forgetting": {"max_increase": 1e-4, "action": "stop"}}}


def test_they_are_scored_every_few_validations_and_at_the_one_that_ends_a_run(tokens, tmp_path):
    data = write_task_files(tmp_path / "data")
    tasks = {"every_steps": 1, "tasks": TASKS[:1], "tasks_include": str(data), "tasks_limit": 4}
    cases = {name: {**changes, "validation": {**changes["validation"], **tasks}} for name, changes in ENDS.items()}
    cases["every second"] = {"schedule__steps": 3, "validation": {**tasks, "tasks_every": 2}}
    cases["without"] = {"schedule__steps": 3, "validation": {"every_steps": 1}}
    configs = [make_run(tmp_path / name, tokens, zero=1, **changes) for name, changes in cases.items()]
    [(stopped, forgot, *codes)] = run_ranks(in_turn, 1, [partial(train, config) for config in configs])
    assert [stopped, *codes] == [0, 0, 0] and forgot.startswith("ForgettingError: ")
    for name in ENDS:
        steps = {line["step"]: "acc/copa" in line for line in metrics(tmp_path / name)}
        assert 0 < max(steps) < LEARNS_NOTHING["schedule__steps"]
        assert [step for step, scored_there in steps.items() if scored_there] == [max(steps)]
    found = metrics(tmp_path / "every second")
    assert [line["step"] for line in found if "acc/copa" in line] == [2, 3]
    assert [line.get("loss") for line in found] == [line.get("loss") for line in metrics(tmp_path / "without")]


def test_settings_of_tasks_need_tasks(tokens, tmp_path):
    with pytest.raises(ConfigError, match="belong to tasks; name some"):
        load_config(write_config(tmp_path, tokens, validation={"tasks_limit": 4}))
