"""Tasks of lm-eval during training have the values that its own Hugging Face model gives, at every layout."""

from __future__ import annotations

from functools import partial

import pytest

from pipeline.errors import ConfigError
from pipeline.evaluation.benchmarks import load_tasks, run_benchmarks
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.evaluation.task_files import write_task_files
from tests.observers.test_early_stop import SETTINGS
from tests.training.runs import in_turn, make_run, metrics, start_deepspeed, train

TASKS = ["kobest_copa", "blimp_passive_1", "arc_easy"]  # the last is neither all right nor all wrong


def scored(config):
    """The tasks' figures before any step, when the model equals its base."""
    start_deepspeed()
    from pipeline.checkpoint.manifest import Position
    from pipeline.observers.tasks import TaskScores
    from pipeline.training.observer import ValidationEvent
    from tests.training.runs import prepared

    trainer, _, _ = prepared(config)
    [tasks] = [member for member in trainer.observers.members if isinstance(member, TaskScores)]
    event = ValidationEvent(Position(), {})
    tasks.on_validation(event)
    return event.figures


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_figures_are_those_of_an_export(tokens, tmp_path, tp_size):
    data = write_task_files(tmp_path / "data")
    settings = {"tasks": TASKS, "tasks_data": str(data), "tasks_limit": 8}
    config = make_run(tmp_path / "run", tokens, zero=1, parallel__tp_size=tp_size, validation=settings)
    results = run_benchmarks(STORIES, load_tasks(TASKS, data=data, limit=8))
    expected = {f"{result.metric}/{result.task}": result.value for result in results}
    assert {"acc/kobest_copa", "acc/blimp_passive_1", "acc/average"} <= expected.keys()
    for figures in run_ranks(scored, 2, config):
        assert figures == pytest.approx(expected)


def test_they_are_scored_every_few_validations_and_at_the_end(tokens, tmp_path):
    data = write_task_files(tmp_path / "data")
    validation = {"every_steps": 1, "tasks": TASKS[:1], "tasks_data": str(data), "tasks_limit": 4, "tasks_every": 2}
    run, plain = (
        make_run(tmp_path / name, tokens, zero=1, schedule__steps=3, **{"validation": settings})
        for name, settings in (("run", validation), ("plain", {"every_steps": 1}))
    )
    assert [run_ranks(train, 1, config) for config in (run, plain)] == [[0], [0]]
    found = metrics(run.parent)
    assert [line["step"] for line in found if "acc/kobest_copa" in line] == [2, 3]
    assert [line.get("loss") for line in found] == [line.get("loss") for line in metrics(plain.parent)]


ENDS = {
    "early stop": SETTINGS,
    "budget": {**SETTINGS, "forgetting": {"max_increase": 1e-4, "action": "stop"}},
}


def test_they_are_scored_at_the_validation_that_ends_a_run(tokens, tmp_path):
    data = write_task_files(tmp_path / "data")
    tasks = {"every_steps": 1, "tasks": TASKS[:1], "tasks_data": str(data), "tasks_limit": 4, "tasks_every": 50}
    configs = [
        make_run(tmp_path / name, tokens, zero=1, **{**changes, "validation": {**changes["validation"], **tasks}})
        for name, changes in ENDS.items()
    ]
    [(stopped, forgot)] = run_ranks(in_turn, 1, [partial(train, config) for config in configs])
    assert stopped == 0 and forgot.startswith("ForgettingError: ")
    for config in configs:
        steps = {line["step"]: "acc/kobest_copa" in line for line in metrics(config.parent)}
        assert 0 < max(steps) < SETTINGS["schedule__steps"]
        assert [step for step, scored_there in steps.items() if scored_there] == [max(steps)]


def test_settings_of_tasks_need_tasks(tokens, tmp_path):
    from pipeline.config.run import load_config
    from tests.training.runs import write_config

    with pytest.raises(ConfigError, match="belong to tasks; name some"):
        load_config(write_config(tmp_path, tokens, validation={"tasks_limit": 4}))
