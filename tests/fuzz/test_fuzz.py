"""The quick form of the fuzz: 200 inputs of a fixed seed, some of every target; and that the fuzz sees each outcome."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import DataError
from tests.fuzz.lanes import fuzz
from tests.fuzz.runner import Laboratory
from tests.fuzz.subject import INPUT, SilentChangeError, Subject
from tests.fuzz.table import OUTCOMES, Result, as_text, faults_as_text

PROJECT = Path(__file__).parents[2]
SEED = 1
INPUTS = 200


@pytest.mark.timeout(1500)
def test_readers_accept_or_refuse_every_input(tmp_path):
    options = ["--inputs", str(INPUTS), "--seed", str(SEED), "--lanes", "1", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "tests.fuzz", *options], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["inputs"] == INPUTS and len(summary["outcomes"]) == 8 and not summary["faults"]


def make() -> None:
    INPUT.mkdir()
    (INPUT / "file").write_text("sound")


def keep(root, pool, draw) -> str:
    return "nothing"


def spoil(root, pool, draw) -> str:
    (root / "file").write_text("spoilt")
    return "spoilt"


def content() -> dict[str, str]:
    return {"text": (INPUT / "file").read_text()}


def only_sound(act):
    """A reader that accepts the sound file, and does something else with any other."""

    def read() -> dict[str, str]:
        return content() if content()["text"] == "sound" else act()

    return read


def refuse(message: str):
    def act():
        raise DataError(message)

    return only_sound(act)


def fail(error: Exception):
    def act():
        raise error

    return only_sound(act)


def take_memory():
    np.ones(2**27)
    time.sleep(60)


READERS = {
    "right": (content, spoil, False),
    "right, unchanged": (content, keep, True),
    "refused": (refuse("input/file: damaged"), spoil, True),
    "vague": (refuse("damaged"), spoil, True),
    "traceback": (fail(KeyError("text")), spoil, True),
    "silent change": (content, spoil, True),
    "silent change, found by the reader": (fail(SilentChangeError("input/file")), spoil, False),
    "hang": (only_sound(lambda: time.sleep(60)), spoil, True),
    "abort": (only_sound(lambda: os.kill(os.getpid(), signal.SIGSEGV)), spoil, True),
    "memory": (only_sound(take_memory), spoil, True),
}


def in_a_new_process(function: Callable[..., Any], *arguments: object) -> Any:
    """The fuzz forks; a child of this process could wait for a lock that one of its threads held."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def each_outcome(folder: Path) -> dict[str, Result]:
    subjects = [Subject(name, "one", make, read, exact, damage) for name, (read, damage, exact) in READERS.items()]
    laboratory = Laboratory(folder, subjects, SEED, seconds=8.0, memory=2**29)
    laboratory.prepare(list(READERS))
    found = fuzz(laboratory, list(READERS), lanes=2, ends=time.monotonic() + 900, inputs=len(READERS))
    return {result.target: result for result in found}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One result of each reader, by its name."""
    folder = tmp_path_factory.mktemp("fuzz")
    return in_a_new_process(each_outcome, folder), folder


@pytest.mark.parametrize("name", READERS)
def test_each_outcome_is_seen(name, results):
    assert results[0][name].outcome == name.partition(",")[0]


def test_inputs_that_are_not_right_or_refused_are_kept_and_reported(results):
    found, folder = results
    bad = [result for result in found.values() if not result.is_good]
    assert sorted(path.name for path in (folder / "failures").iterdir()) == sorted(str(result.number) for result in bad)
    assert (folder / "failures" / str(found["hang"].number) / INPUT / "file").read_text() == "spoilt"
    table, faults = as_text([*found.values()]), faults_as_text([*found.values()], SEED)
    assert all(outcome in table for outcome in OUTCOMES)
    assert all(f"inputs {result.number}" in faults for result in bad)


def what_is_done(folder: Path) -> list[str]:
    laboratory = Laboratory(folder, [Subject("any", "one", make, content)], SEED)
    laboratory.prepare(["any"])
    ended = fuzz(laboratory, ["any"], lanes=1, ends=time.monotonic() + 900, inputs=20)
    return [f"{result.damage} {result.outcome}" for result in ended]


def test_the_same_seed_makes_the_same_input(tmp_path):
    assert in_a_new_process(what_is_done, tmp_path / "a") == in_a_new_process(what_is_done, tmp_path / "b")
