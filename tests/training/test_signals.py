"""The first Ctrl-C asks for the end; the second one does not ask."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from pipeline.exit_codes import INTERRUPTED
from pipeline.training.signals import StopSignals

HANGING = """
from datetime import timedelta
from pipeline.training.signals import StopSignals
import sys, torch.distributed as dist
with StopSignals():
    print("ready", flush=True)
    dist.FileStore(sys.argv[1], 2).wait(["what nobody sets"], timedelta(seconds=60))
"""


def test_a_signal_is_only_noted():
    threads = threading.active_count()
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert signals.received == signal.SIGUSR1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    time.sleep(0.1)
    assert threading.active_count() == threads


def test_the_second_ctrl_c_ends_a_run_that_hangs(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path / "store")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)  # one keystroke, passed on twice
    time.sleep(1)
    assert process.poll() is None, "it hangs in what no signal handler of Python's interrupts"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode == INTERRUPTED
    assert said == "interrupted again: ends without saving\n"
