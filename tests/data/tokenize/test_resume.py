"""A job that continues publishes what an undisturbed one does, whatever became of its files since
it was killed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.data.tokenize import job as preprocessing
from pipeline.data.tokenize import queue as jobs
from pipeline.data.tokenize.unit_records import QUARANTINE, STATE, UnitRecord, WorkUnit, heldout_of
from pipeline.errors import DataError
from pipeline.files.hashes import file_hash
from tests.data.helpers import PROJECT, STORIES260K, contents, documents, tokenize, write_jsonl
from tests.files import change_json, cut, flip_bit
from tests.programs import scale_cpt
from tests.texts import REVIEWS
from tests.waiting import wait_until

SETTINGS = {"heldout_fraction": 0.3, "unit_bytes": 2000}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "flipped": flip_bit,
    "cut": cut,
}


def parts(output: Path) -> dict[str, str]:
    """The files of a corpus and of its held-out part."""
    return contents(output, heldout_of(output))


@pytest.fixture(scope="module")
def source(module_folder: Path) -> Path:
    """Documents, and a bad record in each unit."""
    texts: list[object] = [*documents(120)]
    for at in range(0, len(texts), 4):
        texts[at] = at
    return write_jsonl(module_folder / "x.jsonl", texts)


@pytest.fixture(scope="module")
def undisturbed(source: Path, module_folder: Path) -> dict[str, str]:
    tokenize(module_folder / "whole" / "corpus", source, **SETTINGS)
    made = parts(module_folder / "whole" / "corpus")
    assert len(made) > 20
    return made


@pytest.fixture(scope="module")
def every_unit_done(source: Path, module_folder: Path) -> Path:
    """What a job leaves that ended when its units were done: here it found too many bad records."""
    output = module_folder / "begun" / "corpus"
    with pytest.raises(DataError, match="records are bad"):
        tokenize(output, source, max_bad_fraction=0.0, **SETTINGS)
    return output


@pytest.fixture
def begun(every_unit_done: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(every_unit_done.parent, tmp_path / "begun")
    return tmp_path / "begun" / "corpus"


FILES: dict[str, Callable[[Path], Path]] = {
    ".bin": lambda output: output / "00000-000001.bin",
    ".idx": lambda output: output / "00000-000001.idx",
    "held-out .bin": lambda output: heldout_of(output) / "00000-000001.bin",
    "held-out .idx": lambda output: heldout_of(output) / "00000-000001.idx",
    "quarantine": lambda output: output / STATE / f"00000-000001.{QUARANTINE}",
    "record": lambda output: output / STATE / "00000-000001.json",
    "ranges": lambda output: output / STATE / "00000.ranges.json",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_made_again(
    begun: Path,
    source: Path,
    undisturbed: dict[str, str],
    file: str,
    damage: str,
    caplog: pytest.LogCaptureFixture,
):
    path = FILES[file](begun)
    DAMAGES[damage](path)
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        tokenize(begun, source, **SETTINGS)
    assert parts(begun) == undisturbed
    is_said = f"{path}: " in caplog.text and "its unit is done again" in caplog.text
    assert is_said or (damage == "removed" and path.suffix == ".json"), (
        "a unit without a record is one not done yet"
    )


def change_count(output: Path) -> None:
    path = output / STATE / "00000-000001.json"
    train = json.loads(path.read_text())["train"]
    change_json(path, train=train | {"documents": train["documents"] + 1})


def forget_checksum(output: Path) -> None:
    change_json(output / STATE / "00000-000001.json", checksum=None)


def swap_records(output: Path) -> None:
    first, second = (output / STATE / f"00000-00000{number}.json" for number in (1, 2))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


CHANGES = {
    "a count": change_count,
    "no checksum": forget_checksum,
    "records of each other": swap_records,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_unit_with_a_changed_record_is_done_again(
    begun: Path,
    source: Path,
    undisturbed: dict[str, str],
    change: str,
    caplog: pytest.LogCaptureFixture,
):
    CHANGES[change](begun)
    tokenize(begun, source, **SETTINGS)
    assert parts(begun) == undisturbed
    assert "its unit is done again" in caplog.text


def test_units_that_were_done_for_another_plan_are_done_again(
    begun: Path, source: Path, tmp_path: Path
):
    """With plan.json removed, nothing else would say that they are other documents."""
    (begun / STATE / "plan.json").unlink()
    other = {**SETTINGS, "heldout_fraction": 0.6}
    tokenize(begun, source, **other)
    tokenize(tmp_path / "whole" / "corpus", source, **other)
    assert parts(begun) == parts(tmp_path / "whole" / "corpus")


def test_what_is_sound_is_not_done_again(
    begun: Path, source: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []
    original = preprocessing.tokenize_unit
    monkeypatch.setattr(
        preprocessing,
        "tokenize_unit",
        lambda job, unit: (done.append(unit.name), original(job, unit))[1],
    )
    flip_bit(begun / "00000-000002.bin")
    tokenize(begun, source, **SETTINGS)
    assert done == ["00000-000002"]
    assert parts(begun) == undisturbed


def test_what_another_job_has_compared_meanwhile_is_compared_by_size(
    every_unit_done: Path, begun: Path
):
    """Or each of the jobs of an array that continues would read the whole corpus."""
    state = begun / STATE
    records = jobs._Records(state, UnitRecord, file_hash(state / "plan.json"), jobs._time_of(state))
    unit = WorkUnit("00000-000001", 1, "")
    assert records.kept(unit).record is not None
    shard = begun / "00000-000001.bin"
    flip_bit(shard)
    assert records.kept(unit).record is not None
    assert (
        replace(records, began=jobs._time_of(state))
        .kept(unit)
        .fault.startswith(f"{shard}: damaged")
    )
    cut(shard)
    assert records.kept(unit).fault.startswith(f"{shard}: damaged: expected ")


def test_a_shard_that_vanishes_during_the_work_is_no_part_of_a_finished_corpus(
    begun: Path, source: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    victim = begun / "00000-000001.bin"
    with monkeypatch.context() as patch:
        patch.setattr(preprocessing, "compare_documents", lambda *_: victim.unlink())
        with pytest.raises(
            DataError, match=f"{victim}: no such file; start again: its unit is done again"
        ):
            tokenize(begun, source, **SETTINGS)
    assert not (begun / "manifest.json").exists()
    tokenize(begun, source, **SETTINGS)
    assert parts(begun) == undisturbed


def test_by_command_line_tokenizing_survives_a_kill_and_damage(tmp_path: Path):
    command = (
        "tokenize",
        "--input",
        REVIEWS,
        "--tokenizer",
        STORIES260K,
        "--unit-mib",
        "0.05",
        "--workers",
        "1",
    )
    killed_damaged_and_continued(tmp_path, *command)


def test_by_command_line_sampling_survives_a_kill_and_damage(tmp_path: Path):
    prompts = write_jsonl(
        tmp_path / "o.jsonl", [f"Once upon a time {text}" for text in documents(40)]
    )
    settings = (
        "--tokens",
        "6000",
        "--max-tokens",
        "40",
        "--prompts",
        prompts,
        "--prompt-tokens",
        "6",
    )
    command = ("sample", "--base", STORIES260K, *settings, "--batch-size", "4", "--workers", "1")
    killed_damaged_and_continued(tmp_path, *command, state_files=("prompts.bin", "prompts.idx"))


def killed_damaged_and_continued(
    folder: Path, *command: object, state_files: tuple[str, ...] = ()
) -> None:
    """Six units are damaged, each in another way, and then files of the folder of unfinished work."""
    whole, output = folder / "whole" / "corpus", folder / "killed" / "corpus"
    assert scale_cpt(*command, "--output", whole).returncode == 0
    words = [sys.executable, "-m", "pipeline", *map(str, command), "--output", str(output)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=PROJECT, stderr=log, stdout=log, start_new_session=True
        )
    assert wait_until(lambda: len(list((output / STATE).glob("*-*[0-9].json"))) >= 6, every_s=0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, (folder / "log").read_text()
    units = sorted(path.stem for path in (output / STATE).glob("*-*[0-9].json"))
    kinds = [(end, damage) for end in (".bin", ".idx") for damage in DAMAGES]
    for unit, (end, damage) in zip(units, kinds, strict=False):
        DAMAGES[damage](output / f"{unit}{end}")
    for name, damage in zip(state_files, ("flipped", "removed"), strict=False):
        DAMAGES[damage](output / STATE / name)
    continued = scale_cpt(*command, "--output", output)
    assert continued.returncode == 0, continued.stderr
    assert continued.stderr.count("its unit is done again") >= 5
    assert contents(output) == contents(whole)
