"""The launcher of one machine's ranks says which rank failed first, and ends with that fault's exit
code.
"""

from __future__ import annotations

import logging
import signal

import pytest

from pipeline.local_ranks import FORWARDED, run_ranks
from tests.waiting import PATIENCE_S

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
