"""The first Ctrl-C asks for a save and a stop; the second ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from pipeline.errors import INTERRUPTED
from pipeline.training.launch import StopSignals
from tests.waiting import PATIENCE_S, wait_until

KEYSTROKE_S = 3.0
HANGING = f"""
from datetime import timedelta
from pipeline.training import launch
from pipeline.training.launch import StopSignals
import sys, torch.distributed as dist
launch._SAME_KEYSTROKE_S = {KEYSTROKE_S}
with StopSignals():
    print("ready", flush=True)
    dist.FileStore(sys.argv[1], 2).wait(["what nobody sets"], timedelta(hours=1))
"""


def test_a_signal_is_only_recorded():
    before = threading.enumerate()
    with StopSignals() as signals:
        [listener] = set(threading.enumerate()) - set(before)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wait_until(lambda: signals.received == signal.SIGUSR1, every_s=0.01)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    listener.join(PATIENCE_S)
    assert not listener.is_alive()


def test_the_second_ctrl_c_ends_a_run_that_hangs(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path / "store")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)  # one keystroke, passed on twice
    time.sleep(2 * KEYSTROKE_S)
    assert process.poll() is None, "it hangs in what no signal handler of Python's interrupts"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == INTERRUPTED
    assert said == "interrupted again: ends without saving\n"
