"""What `--set` changes holds for every later command on a run's folder."""

from __future__ import annotations

import logging

import pytest

from pipeline.config.method import Lora
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError, DataError, FolderTakenError, RunFolderError
from pipeline.run_folder.attempts import stage_of
from pipeline.run_folder.changes import NAME, read_run, recorded_changes
from pipeline.run_folder.lock import RunLock
from tests.training.runs import write_config


@pytest.fixture
def path(tmp_path):
    return write_config(tmp_path / "run", tmp_path)


def test_a_change_holds_for_later_commands_until_another_replaces_it(path, caplog):
    given = ["schedule.steps=20", "data.corpora.korean.weight=2"]
    with stage_of(read_run(path, given), "tokenize", changes=given):
        assert read_run(path).schedule.steps == 20  # from the beginning: the command may be killed
    again = ["schedule.steps=30", "seed=7"]
    with caplog.at_level(logging.INFO), stage_of(read_run(path, again), "upscale", changes=again, alone=True):
        pass
    assert "data.corpora.korean.weight=2" in caplog.text and "schedule.steps" not in caplog.text
    later = read_run(path)
    assert (later.schedule.steps, later.seed, later.data.corpora["korean"].weight) == (30, 7, 2)
    (later.folder / NAME).unlink()
    assert read_run(path).schedule.steps == 6


def test_a_section_and_its_keys_are_set_one_after_the_other(path):
    def settled(*given: str) -> RunConfig:
        config = read_run(path, given)
        with stage_of(config, "tokenize", changes=given):
            pass
        assert read_run(path) == config  # without --set it is the same run
        return config

    assert settled("data.corpora.english.epochs=2").data.corpora["english"].epochs == 2
    assert list(settled("data.corpora.english=null", "data.replay_fraction=0").data.corpora) == ["korean"]
    assert recorded_changes(path.parent) == {"data.corpora.english": "null", "data.replay_fraction": "0"}
    config = settled("data.corpora.english.input=[a.jsonl]", "data.corpora.english.weight=2")
    assert (config.data.corpora["english"].weight, config.data.corpora["english"].heldout_input) == (2, [])
    assert settled("method.rank=4", "method.name=lora").method == Lora(name="lora", rank=4)


def test_commands_that_only_look_record_nothing(path):
    assert read_run(path, ["schedule.steps=20"]).schedule.steps == 20
    assert not (path.parent / NAME).exists()


def test_a_change_that_the_command_refuses_is_not_kept(path):
    folder = read_run(path).folder
    with pytest.raises(DataError), stage_of(read_run(path), "tokenize", changes=["seed=7"]):
        raise DataError("no such text")
    assert not (folder / NAME).exists()
    with stage_of(read_run(path), "tokenize", changes=["seed=7"]):
        pass
    with pytest.raises(DataError), stage_of(read_run(path), "tokenize", changes=["seed=8", "name=other"]):
        raise DataError("no such text")
    assert recorded_changes(folder) == {"seed": "7"}


def test_a_folder_that_another_command_uses_keeps_its_record(path):
    config = read_run(path)
    with (
        RunLock(config.folder, "convert"),
        pytest.raises(FolderTakenError),
        stage_of(config, "convert", changes=["seed=7"], alone=True),
    ):
        pass
    assert recorded_changes(config.folder) == {}


def test_a_change_may_give_what_the_file_leaves_out(path):
    text = path.read_text()
    path.write_text(text.replace("  steps: 6\n", ""))
    assert path.read_text() != text
    with stage_of(read_run(path, ["schedule.steps=20"]), "tokenize", changes=["schedule.steps=20"]):
        pass
    assert read_run(path).schedule.steps == 20
    path.write_text("name: no run\n")
    with pytest.raises(ConfigError, match="folder: missing"):
        read_run(path)


def test_another_folder_is_another_run(path, tmp_path):
    given = [f"folder={tmp_path / 'other'}", "seed=7"]
    with stage_of(read_run(path, given), "tokenize", changes=given):
        pass
    assert recorded_changes(tmp_path / "other") == {"seed": "7"}  # without the folder, which may be moved
    assert read_run(path).seed != 7
    assert read_run(path, given[:1]).seed == 7


def test_a_record_that_was_changed_by_hand_is_refused(path):
    with stage_of(read_run(path), "tokenize", changes=["seed=7"]):
        pass
    record = path.parent / NAME
    record.write_text(record.read_text().replace("7", "8", 1))
    with pytest.raises(RunFolderError, match="remove it, and give the changes again"):
        read_run(path)


def test_a_change_needs_a_configuration():
    with pytest.raises(ConfigError, match="name it with --config"), stage_of(None, "tokenize", changes=["seed=7"]):
        pass
