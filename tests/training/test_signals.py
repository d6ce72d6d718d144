"""The first Ctrl-C asks for a save and a stop; the second ends the process."""

from __future__ import annotations

import os
import signal

import pytest

from pipeline.training import launch
from pipeline.training.launch import StopSignals


def test_a_signal_is_recorded_and_a_second_ctrl_c_interrupts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == signal.SIGUSR1
        for now[0] in (100.0, 100.1):  # one keystroke, passed on twice
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        now[0] = 101.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
