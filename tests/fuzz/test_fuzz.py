"""The quick form of the fuzz: 120 inputs of a fixed seed, some of every target."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.data.helpers import PROJECT

pytestmark = pytest.mark.full


@pytest.mark.timeout(3000)
def test_readers_accept_or_refuse_every_input(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "120", "--seed", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["inputs"] == 120 and not summary["faults"]
