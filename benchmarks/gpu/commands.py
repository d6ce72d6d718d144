"""Runs the project's programs as users do: in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.setting import Setting
from benchmarks.results import ROOT

# Variables that begin like this would make these runs ranks of the allocation that they run in.
_OF_A_LAUNCHER = (
    "SLURM_",
    "OMPI_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_",
    "EXPECTED_WORLD_SIZE",
)


def run_command(
    command: list[str], setting: Setting, *, timeout: float | None = None, **variables: str
) -> str:
    """Runs a command of the project, with further environment `variables`.

    Returns:
        What it wrote to stderr, where the project's messages go.

    Raises:
        RuntimeError: it failed; with its error.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    environment: dict[str, str] = {}
    for name, value in os.environ.items():
        if not name.startswith(_OF_A_LAUNCHER):
            environment[name] = value
    # Shell scripts call `python`: it must be the one that runs this.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    environment["DS_ACCELERATOR"] = setting.device_type
    environment |= variables
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        output = done.stderr + done.stdout
        # Into the log of this part, which keeps what the one line of the row leaves out.
        print(output, file=sys.stderr)
        error = error_line(output)
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}: {error[:400]}")
    return done.stderr


def error_line(output: str) -> str:
    """The line that says most about a failure.

    That is the first error of the project; without one the last exception, and else the last line.
    """
    raised = ""
    last = "no output"
    for line in output.splitlines():
        if line.startswith("error:"):
            return line
        if re.match(r"[\w.]*(Error|Exception)\b", line):
            raised = line
        if line.strip():
            last = line
    return raised or last
