"""The quick form of the fuzz: inputs of a fixed seed, some of every target; and that the fuzz sees
what readers do."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.data.helpers import PROJECT
from tests.fuzz import liars
from tests.fuzz.runner import GOOD, Result, results

INPUTS = 240
ALARM_S = 5
"""For readers that need a millisecond or hang."""


def fuzz(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *map(str, options)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)


@pytest.mark.timeout(3000)
def test_readers_accept_or_refuse_every_input(tmp_path):
    done = fuzz("--inputs", INPUTS, "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["inputs"] == INPUTS and not summary["faults"]


def test_one_subject_alone(tmp_path):
    done = fuzz("--only", "gates", "--inputs", 20, "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"gates"}
    assert json.loads((tmp_path / "summary.json").read_text())["inputs"] == 20


def results_of_liars(folder: Path, inputs: int) -> list[Result]:
    return list(results(folder, liars.subjects(), 1, range(inputs), ALARM_S))


def test_readers_that_lie_are_found_and_their_inputs_kept(tmp_path):
    # The fuzz forks, and a child of this process could wait for a lock that one of its threads
    # held.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        found = executor.submit(results_of_liars, tmp_path, len(liars.LIARS)).result()
        again = executor.submit(results_of_liars, tmp_path / "again", 3).result()
    outcomes = {result.target: result.outcome for result in found}
    assert outcomes == {name: outcome for name, (outcome, _) in liars.LIARS.items()}
    bad = {f"input-{result.number}" for result in found if result.outcome not in GOOD}
    assert {path.name for path in tmp_path.glob("input-*")} == bad
    # A seed and a number make the same input again.
    assert [result.damage for result in again] == [result.damage for result in found[:3]]
