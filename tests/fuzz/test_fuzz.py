"""The quick form of the fuzz: 120 inputs of a fixed seed, some of every target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
