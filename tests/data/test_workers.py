"""Processes that die: of a signal, and with their parent."""

from __future__ import annotations

import os
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
        pytest.raises(DataError, match=r"killed at (good\.parquet or )?bad\.parquet; start"),
    ):
        list(workers.run(die_of_a_signal, tasks))


def test_nothing_outlives_a_killed_parent():
    code = (
        "from pipeline.data.workers import local_workers\n"
        "import time\n"
        "with local_workers(2) as workers:\n"
        "    for pid in workers.run(eval, ['__import__(\"os\").getpid()']):\n"
        "        print(pid, flush=True)\n"
        "    list(workers.run(time.sleep, [999, 999]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()  # its workers are at work
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3  # the fork server, its tracker, a worker
    process.kill()
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
