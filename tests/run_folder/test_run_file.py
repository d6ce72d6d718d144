"""A run's folder describes the run: its first stage writes run.yaml, and every command takes the
folder.
"""

from __future__ import annotations

import errno
import shutil
from unittest.mock import patch

import pytest

from pipeline.config.run import load_config
from pipeline.config.sources import RUN_FILE
from pipeline.errors import ConfigError, DataError
from pipeline.run_folder.attempts import read_attempts, record_training
from pipeline.run_folder.run_file import write_gate, write_new_run, write_run
from pipeline.run_folder.serial_stage import serial_stage
from tests.training.runs import write_config

CHANGES = ["schedule.steps=20", "data.corpora.korean.weight=2"]


@pytest.fixture
def path(tmp_path):
    """A run's file, which extends another."""
    write_config(tmp_path, tmp_path, name="base.yaml", folder=str(tmp_path / "run"))
    file = tmp_path / "mine.yaml"
    file.write_text("extends: base.yaml\nname: mine\n")
    return file


def test_the_first_stage_writes_the_run_as_it_was_started_and_its_folder_stands_for_it(path):
    config = load_config(path, CHANGES)
    with pytest.raises(DataError), serial_stage(config, "tokenize"):
        raise DataError("a check fails")
    assert not config.folder.exists()
    with pytest.raises(DataError), serial_stage(config, "tokenize"):
        write_new_run(config)
        raise DataError("found after hours, or by another task of the array")
    assert load_config(config.folder) == config
    with serial_stage(load_config(path), "upscale", locked=True):
        assert load_config(config.folder) == config  # only training and the gate write it again
    assert load_config(path).schedule.steps == 6  # what the command line says is what runs
    assert load_config(config.folder, ["seed=7"]).seed == 7


def test_training_writes_the_run_again_and_logs_what_changed(path, caplog):
    folder = load_config(path).folder
    with caplog.at_level("INFO"):
        record_training(load_config(path), 2, 0)
        assert "changed" not in caplog.text
        record_training(load_config(path, CHANGES), 2, 0)
    assert caplog.messages == [
        f"{folder / RUN_FILE}: changed: + weight: 2.0, - steps: 6, + steps: 20"
    ]
    assert load_config(folder) == load_config(path, CHANGES)
    newest = read_attempts(folder)[-1].training
    assert newest is not None
    assert newest.changed == ("+ weight: 2.0", "- steps: 6", "+ steps: 20")


def test_the_gate_writes_its_own_section_and_keeps_what_training_used(path, caplog):
    trained = load_config(path, ["schedule.learning_rate=0.001"])
    record_training(trained, 2, 0)
    with caplog.at_level("INFO"):
        write_gate(load_config(path, ["schedule.learning_rate=0.011", "gate.tokens=64"]))
    recorded = load_config(trained.folder)
    assert recorded.gate is not None and recorded.gate.tokens == 64
    assert recorded.model_copy(update={"gate": trained.gate}) == trained
    run_file = trained.folder / RUN_FILE
    assert caplog.messages == [
        f"{run_file} keeps what training used; this command was given other settings: "
        "schedule.learning_rate 0.011 (recorded: 0.001)",
        f"{run_file}: changed: +gate:, + tokens: 64",
    ]


def test_the_gate_of_a_run_without_a_record_writes_the_run(path, caplog):
    config = load_config(path, ["gate.tokens=64"])
    with caplog.at_level("WARNING"):
        write_gate(config)
        write_gate(config)
    assert load_config(config.folder) == config and not caplog.messages


def test_a_file_that_the_user_wrote_there_is_left_as_it_is(tmp_path):
    mine = write_config(tmp_path, tmp_path, name=RUN_FILE)
    mine.write_text(before := f"# mine\n{mine.read_text()}")
    write_run(load_config(mine, CHANGES))
    assert mine.read_text() == before


def test_a_file_that_cannot_be_written_ends_no_run(path, tmp_path, caplog):
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("pipeline.run_folder.run_file.write_text", side_effect=full):
        record_training(load_config(path), 2, 0)
    assert caplog.messages == [
        f"{tmp_path / 'run' / RUN_FILE}: this run is not recorded: No space left on device"
    ]
    assert len(read_attempts(tmp_path / "run")) == 1


def test_a_folder_that_was_moved_is_its_own(path, tmp_path):
    folder, moved = load_config(path).folder, tmp_path / "moved"
    write_run(config := load_config(path, [f"data.folder={folder}/tokens"]))
    shutil.move(folder, moved)
    data = config.data.model_copy(update={"folder": moved / "tokens"})
    assert load_config(moved) == config.model_copy(update={"folder": moved, "data": data})


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"{RUN_FILE}: cannot read this configuration"):
        load_config(tmp_path)
