"""What a command takes: its time, and the processor time and memory of all its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.results import ROOT

# Runs a command in a process that adopts what the command's processes leave behind
# (PR_SET_CHILD_SUBREAPER of prctl(2)). Only processes that their parent has waited for are in its
# usage; workers that outlive the command would be missing.
_WITH_USAGE = """
import ctypes, os, resource, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
code = subprocess.run(sys.argv[1:]).returncode
try:
    while True: os.wait()
except ChildProcessError: pass
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print("\\n", usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
sys.exit(code)
"""
_SHOWN = 3000
"""Characters of a failed command's output that are shown."""


class Usage(NamedTuple):
    """What a command and all its processes took."""

    seconds: float
    cpu_seconds: float
    """Of all processes, in user code and in the kernel."""
    peak_mib: float
    """Of the largest process: memory that several share would count several times in a sum."""


def best_of(runs: Sequence[Usage]) -> Usage:
    """The least of each figure: other load on the machine only ever adds to them."""
    return Usage(
        seconds=min(run.seconds for run in runs),
        cpu_seconds=min(run.cpu_seconds for run in runs),
        peak_mib=min(run.peak_mib for run in runs),
    )


def usage_of(command: Sequence[str]) -> Usage:
    """Runs a command, which must succeed.

    Raises:
        SystemExit: it fails; with the end of its output.
    """
    path = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        # By default tokenizers turn their threads off in a process that has forked.
        "TOKENIZERS_PARALLELISM": "true",
        # Asking the hub for a newer version of a local file would be in the time.
        "HF_HUB_OFFLINE": "1",
    }
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _WITH_USAGE, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=ROOT,
    )
    elapsed = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-_SHOWN:]}"
        )
    # The last line is that of the process above; what the command printed stands before it.
    cpu_seconds, peak_mib = done.stdout.split()[-2:]
    return Usage(elapsed, float(cpu_seconds), float(peak_mib))
