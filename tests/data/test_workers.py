"""Processes that die: of a signal, and with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pipeline.data.workers import local_workers
from pipeline.errors import DataError
from tests.data.helpers import PROJECT
from tests.waiting import PATIENCE_S


def die_of_a_signal(task: str) -> str:
    if task == "bad.parquet":
        time.sleep(0.2)  # the other process is at work by then
        os.abort()
    time.sleep(PATIENCE_S)
    return task


@pytest.mark.parametrize("tasks", [["good.parquet", "bad.parquet"], ["bad.parquet"]])
def test_the_file_at_which_a_process_aborts_is_named(tasks: list[str]):
    with (
        local_workers(len(tasks), isolated=True) as workers,
        pytest.raises(DataError, match=r"killed at bad\.parquet \(Aborted, signal 6\); start"),
    ):
        list(workers.run(die_of_a_signal, tasks))


def test_nothing_outlives_a_killed_parent():
    """Not even where a worker holds Python's lock for long, as a library may that does not return."""
    code = (
        "from pipeline.data.workers import local_workers\n"
        "import re\n"
        "with local_workers(2) as workers:\n"
        "    list(workers.run(re.compile('(a|a)*b').search, ['a' * 60] * 2))\n"
    )
    parent = psutil.Process(subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT).pid)
    until = time.monotonic() + PATIENCE_S
    while len(family := parent.children(recursive=True)) < 4:  # the fork server, its tracker, two workers
        assert time.monotonic() < until
        time.sleep(0.02)
    while min(process.cpu_times().user for process in family[-2:]) < 0.1:
        assert time.monotonic() < until
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(family, timeout=10)[1]
