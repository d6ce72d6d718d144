"""The processes of a pool: what is left of them after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from pipeline.data.tokenize.workers import local_workers

def kill(parent):
    os.kill(parent if sys.argv[1] == "parent" else os.getpid(), signal.SIGKILL)
    time.sleep(60)

if __name__ == "__main__":
    with local_workers(2, preload="json") as workers:
        list(workers.run(kill, [os.getpid()]))
"""


@pytest.mark.parametrize("who", ["worker", "parent"])
def test_nothing_is_printed_about_semaphores_after_a_kill(tmp_path, who):
    (program := tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(program), who],
        env=dict(os.environ),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )  # which reads until the last process that has the pipe open has ended
    assert (ended.returncode == -signal.SIGKILL) == (who == "parent")
    assert "resource_tracker" not in ended.stderr
    assert "UserWarning" not in ended.stderr
    assert ("a worker process was killed" in ended.stderr) == (who == "worker")
