"""The launcher of one machine's ranks says which rank failed first, and ends with that fault's exit
code.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.local_ranks import FORWARDED, run_ranks
from tests.waiting import PATIENCE_S, wait_until

# Rank 1 fails in its own way; the others abort when they see that it is gone, as NCCL does.
PROGRAM = """
import os, signal, sys, time
mark = sys.argv[1]
if os.environ["RANK"] == "1":
    open(mark, "w").close()
    {fault}
while not os.path.exists(mark):
    time.sleep(0.01)
time.sleep(0.5)
os.abort()
"""


@pytest.mark.parametrize(
    ("fault", "code"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_aborts_after_a_rank_failed_are_its_consequence(tmp_path, caplog, monkeypatch, fault, code):
    monkeypatch.setattr(logging.getLogger("pipeline"), "propagate", True)
    monkeypatch.setenv("EXIT_GRACE_S", str(PATIENCE_S))
    assert run_ranks(["-c", PROGRAM.format(fault=fault), str(tmp_path / "failed")], 2) == code
    assert "rank 0 aborted because rank 1 had failed before" in caplog.text


def test_an_abort_without_another_fault_counts():
    before = [signal.getsignal(number) for number in FORWARDED]
    assert run_ranks(["-c", "import os; os.abort()"], 1) == 134
    assert [signal.getsignal(number) for number in FORWARDED] == before


# Says that it runs, and at SIGTERM that it was asked to stop.
STOPS = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def stop(number, frame):
    (folder / f"stopped {rank}").touch()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
(folder / f"runs {rank}").touch()
time.sleep(600)
"""
LAUNCHER = """
import sys
from pipeline.local_ranks import run_ranks
run_ranks(["-c", *sys.argv[1:]], 2)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a signal of Linux")
def test_a_launcher_that_is_killed_leaves_no_rank(tmp_path):
    def both(what: str) -> bool:
        return all(Path(tmp_path / f"{what} {rank}").exists() for rank in (0, 1))

    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, STOPS, str(tmp_path)])
    assert wait_until(lambda: both("runs"))
    launcher.kill()
    launcher.wait()
    assert wait_until(lambda: both("stopped"))
