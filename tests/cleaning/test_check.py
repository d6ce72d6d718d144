"""make clean-check, at its smallest."""

from __future__ import annotations

import subprocess
import sys

from tests.data.helpers import PROJECT


def test_the_check_prints_every_kind_and_step() -> None:
    command = [sys.executable, "-m", "tests.cleaning", "--copies", "2"]
    printed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert "one line, repeated" in printed
    assert printed.splitlines()[-1].startswith("contamination")
