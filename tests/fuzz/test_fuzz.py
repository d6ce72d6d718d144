"""The quick form of the fuzz: 120 inputs of a fixed seed, some of every target; and that the fuzz sees each outcome."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random

import pytest

from pipeline.errors import DataError
from tests.fuzz.runner import GOOD, INPUT, Result, Subject, results

PROJECT = Path(__file__).parents[2]
INPUTS = 120


@pytest.mark.timeout(3000)
def test_readers_accept_or_refuse_every_input(tmp_path):
    options = ["--inputs", str(INPUTS), "--seed", "1", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "tests.fuzz", *options], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["inputs"] == INPUTS and not summary["faults"]
    rows = done.stdout.splitlines()[1:]
    assert len(rows) == 4 and all(" right" in row or " refused" in row for row in rows)


def make() -> None:
    INPUT.mkdir()
    (INPUT / "file").write_text("sound")


def spoil(root: Path, _: Random) -> str:
    (root / "file").write_text("spoilt")
    return "spoilt"


def fail(error: Exception) -> None:
    raise error


OUTCOMES: dict[str, Callable[[], object]] = {
    "right": bool,
    "silent change": bool,
    "refused": partial(fail, DataError("input/file: damaged")),
    "vague": partial(fail, DataError("damaged")),
    "traceback": partial(fail, KeyError("text")),
    "hang": partial(os.kill, 0, signal.SIGXCPU),
    "abort": partial(os.kill, 0, signal.SIGSEGV),
}


def read(outcome: str) -> dict[str, str]:
    """Accepts the sound file; any other ends in that outcome."""
    text = (INPUT / "file").read_text()
    if text != "sound":
        OUTCOMES[outcome]()
    return {"text": text}


def one_of_each(folder: Path) -> list[Result]:
    subjects = [Subject(name, "one", make, partial(read, name), name != "right", spoil) for name in OUTCOMES]
    return list(results(folder, subjects, 1, range(len(OUTCOMES))))


def test_each_outcome_is_seen(tmp_path):
    # The fuzz forks; a child of this process could wait for a lock that one of its threads held.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        found = executor.submit(one_of_each, tmp_path).result()
    assert {result.subject: result.outcome for result in found} == {f"{name}/one": name for name in OUTCOMES}
    bad = {f"input-{result.number}" for result in found if result.outcome not in GOOD}
    assert {path.name for path in tmp_path.glob("input-*")} == bad
