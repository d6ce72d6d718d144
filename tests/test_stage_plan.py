"""The stages of a run: their settings, their faults in one line, and the steps of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.checks.checklist import check_stage
from pipeline.config.run import load_config
from pipeline.config.stage_plan import stage_after, tokens_after, training_stages
from pipeline.errors import ConfigError, LayoutError
from pipeline.training.learning_rate import learning_rate
from tests.training.runs import write_config

TWO = [{"name": "rows", "steps": 2, "trains": "output"}, {"name": "all", "steps": 4}]


def changed(number: int, **settings: Any) -> list[dict[str, Any]]:
    """`TWO`, one of them with other settings."""
    stages = [dict(stage) for stage in TWO]
    stages[number] |= settings
    return stages


@pytest.mark.parametrize(
    ("stages", "fault"),
    [
        (changed(0, steps=3), "stages: their steps add up to 7, but schedule.steps is 6"),
        (changed(1, name="rows"), "stages: two have the name rows"),
        (changed(1, weights={"german": 1}), r"stages.all: weights: german is no corpus .*english"),
        (changed(1, weights={"korean": 0}), "stages.all: no corpus has the role new"),
        (
            changed(1, weights={"english": 0}),
            "stages.all: replay_fraction is above 0 but no corpus",
        ),
        (changed(0, passage_steps=1), "stages.rows.passage_steps: no stage comes before"),
        (changed(1, passage_steps=1), "stages.all.passage_steps: .* has the same weights"),
        (
            changed(1, passage_steps=5, replay_fraction=0.5),
            "stages.all.passage_steps: found 5, expected at most the stage's 4 steps",
        ),
        (changed(1, trains=[1]), None),
        (changed(1, learning_rate=0), "stages.1.learning_rate: Input should be greater than 0"),
        (changed(1, rate=1), "stages.1.rate: unknown key"),
    ],
)
def test_a_fault_is_one_line_that_names_the_setting(stages, fault, tmp_path):
    path = write_config(tmp_path, tmp_path, stages=stages)
    if fault is None:
        assert load_config(path).stages[1].trains == ["1"]
        return
    with pytest.raises(ConfigError, match=fault) as error:
        load_config(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        (["schedule.steps=12"], [4, 8]),
        (["schedule.steps=3"], [1, 2]),
        (["stages.0.steps=6"], [6, 4]),
        (["stages.rows.steps=1", "stages.all.steps=1"], [1, 1]),
        (["stages.0.steps=1", "schedule.steps=5"], [1, 4]),
        (["stages=[{name: one, steps: 3}]"], [3]),
        (["seed=3"], [2, 4]),
    ],
)
def test_the_command_line_changes_all_steps_or_those_of_a_stage(changes, steps, tmp_path):
    config = load_config(write_config(tmp_path, tmp_path, stages=TWO), changes)
    assert [stage.steps for stage in config.stages] == steps
    assert config.schedule.steps == sum(steps)


def test_a_passage_is_as_long_a_part_of_its_stage_as_before(tmp_path):
    stages = changed(1, passage_steps=2, replay_fraction=0.5)
    config = load_config(write_config(tmp_path, tmp_path, stages=stages), ["schedule.steps=60"])
    assert (config.stages[1].steps, config.stages[1].passage_steps) == (40, 20)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("schedule.steps=1", "schedule.steps: found 1, expected at least one for each of the 2"),
        ("stages.7.steps=1", "stages.7.steps=1: found no item 7; expected one of 0, 1, rows, all"),
        ("stages.rws.steps=1", "found no item rws; expected one of 0, 1, rows, all"),
        ("validation.prompts.0.x=1", "item 0 is no section, and has no x"),
        ("stages.0.steps=-1", "stages.0.steps: Input should be greater than 0"),
    ],
)
def test_a_change_that_fits_no_stage_is_a_fault_of_one_line(change, fault, tmp_path):
    path = write_config(tmp_path, tmp_path, stages=TWO, validation__prompts=["one"])
    with pytest.raises(ConfigError, match=re.escape(fault)) as error:
        load_config(path, [change])
    assert "\n" not in str(error.value)


def test_a_corpus_that_no_stage_reads_is_a_fault(tmp_path):
    stages = [stage | {"weights": {"more": 0}} for stage in TWO]
    path = write_config(
        tmp_path, tmp_path, stages=stages, data__corpora__more={"input": ["more.jsonl"]}
    )
    with pytest.raises(ConfigError, match=r"data\.corpora\.more: no stage reads it"):
        load_config(path)


def test_a_passage_into_training_by_kl_is_a_fault(tmp_path):
    stages = changed(1, passage_steps=1, replay_fraction=0.5)
    stages[0]["replay_fraction"] = 0.0
    path = write_config(tmp_path, tmp_path, stages=stages, data__replay_loss="kl")
    with pytest.raises(ConfigError, match="one of the two stages trains by KL"):
        load_config(path)


@pytest.mark.parametrize(
    ("stages", "error", "fault"),
    [
        (
            changed(0, trains="ouput"),
            ConfigError,
            "stages.rows.trains: 'ouput' matches no parameter that trains.*did you mean output",
        ),
        (
            changed(1, sequence_length=4096),
            ConfigError,
            "stages.all.sequence_length: 4096 is beyond the base's context of 512",
        ),
        (
            changed(1, global_batch_size=9),
            LayoutError,
            "stages.all.global_batch_size: 9 does not divide",
        ),
    ],
)
def test_what_does_not_fit_the_base_or_the_ranks_is_a_fault_before_training(
    stages, error, fault, tmp_path
):
    config = load_config(write_config(tmp_path, tmp_path, stages=stages))
    with pytest.raises(error, match=fault):
        check_stage(config, 1, "tokenize")


def test_a_stage_has_the_runs_settings_but_for_its_own(tmp_path):
    stages = changed(1, learning_rate=1.0, sequence_length=16, weights={"english": 3})
    config = load_config(write_config(tmp_path, tmp_path, stages=stages))
    rows, everything = training_stages(config)
    assert (rows.first_step, rows.end_step, everything.first_step, everything.end_step) == (
        (0, 2, 2, 6)
    )
    assert rows.config.data == config.data
    assert rows.config.schedule == config.schedule.model_copy(update={"steps": 2})
    assert everything.config.data.sequence_length == 16
    assert everything.config.data.corpora["english"].weight == 3
    assert config.data.corpora["english"].weight == 1
    assert everything.trained_before == (("output",),)
    assert (rows.config.trains, everything.config.trains, config.trains) == (["output"], [], [])
    plan = [stage_after([rows, everything], step).name for step in range(7)]
    assert plan == ["rows"] * 2 + ["all"] * 5
    assert [tokens_after([rows, everything], step) for step in (0, 1, 2, 3, 6)] == (
        [0, 256, 512, 640, 1024]
    )
    assert learning_rate(0, everything.config.schedule) == 1.0


def test_a_run_without_stages_is_one(tmp_path):
    config = load_config(write_config(tmp_path, tmp_path))
    [stage] = training_stages(config)
    assert stage.config is config and stage.name == "" and stage.trained_before == ()


def test_the_resolved_configuration_lists_the_stages(tmp_path):
    config = load_config(write_config(tmp_path, tmp_path, stages=TWO))
    again = Path(tmp_path / "again.yaml")
    again.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    assert load_config(again) == config
