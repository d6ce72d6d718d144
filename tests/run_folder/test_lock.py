"""Two processes and one run folder: the second is refused with the name of the first, and a dead owner is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.errors import LOST_RANK, RunFolderError
from pipeline.run_folder import lock
from pipeline.run_folder.lock import LockOwner, RunLock, lock_path, read_lock_owner
from tests.waiting import wait_until

HOLD = """
import sys, time
from pathlib import Path
from pipeline.run_folder import lock
lock.TOUCH_EVERY_S = 0.2
with lock.RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def elsewhere(folder: Path) -> None:
    """Rewrites the lock so that its owner is on another machine, whose processes are unknown here."""
    path = lock_path(folder)
    os.utime(path, (1, 1))
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))


def test_the_second_process_is_refused_in_one_line_that_names_the_first(tmp_path):
    with holder(tmp_path, SLURM_JOB_ID="12", SLURMD_NODENAME="gpu7") as first:
        with pytest.raises(RunFolderError, match="scancel 12") as refused, RunLock(tmp_path):
            pass
        said = str(refused.value)
        assert f"job 12 on gpu7 (pid {first.pid}, since 20" in said
        assert "\n" not in said


def test_a_normal_exit_removes_the_lock(tmp_path):
    with holder(tmp_path) as first:
        assert first.stdin is not None
        first.stdin.close()
        first.wait()
        assert not lock_path(tmp_path).exists()
    with RunLock(tmp_path):
        assert lock_path(tmp_path).exists()


def test_a_killed_owner_on_this_machine_is_replaced_immediately(tmp_path):
    with holder(tmp_path) as first:
        first.kill()
        first.wait()
    started = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - started < lock.STALE_AFTER_S / 2
        held = read_lock_owner(lock_path(tmp_path))
        assert held is not None and held.pid == os.getpid()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Fakes Slurm's answers, by command; tests/slurm/test_lock.py tests the real ones."""

    def answers(**by_command: str) -> None:
        for command, answer in by_command.items():
            (tmp_path / command).write_text(f"#!/bin/sh\necho '{answer}'\n")
            (tmp_path / command).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return answers


@pytest.fixture
def own():
    """This process, as the second start of a job."""
    return replace(LockOwner.this_process(), cluster="a", job="12", restart=2, node="n1")


@pytest.mark.parametrize(
    ("state", "gone"), [("idle", True), ("mixed", True), ("down*", False), ("idle*", False), ("", False)]
)
def test_a_requeued_job_replaces_its_earlier_start_unless_slurm_lost_contact_with_the_node(own, slurm, state, gone):
    slurm(sinfo=state)
    assert replace(own, boot="another", restart=1).is_gone(own) is gone
    assert not replace(own, boot="another").is_gone(own), "a rank of the same start on another node"


def test_a_job_with_the_same_id_on_another_cluster_is_another_job(own, slurm):
    slurm(sinfo="idle", squeue="")  # squeue knows no such job here
    elsewhere = replace(own, boot="another", cluster="b")
    assert not replace(elsewhere, restart=1).is_gone(own)
    assert not replace(elsewhere, job="13").is_gone(own)
    assert replace(elsewhere, cluster="a", job="13").is_gone(own)


def test_pids_of_another_container_are_not_compared(own):
    dead = replace(own, job=None, process_started=own.process_started - 1)
    assert dead.is_gone(own)
    assert not replace(dead, processes="pid:[1]").is_gone(own)


def test_a_job_whose_earlier_start_is_alive_exits_with_a_code_that_is_retried(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with holder(tmp_path, SLURM_RESTART_COUNT="1"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        with pytest.raises(RunFolderError) as refused, RunLock(tmp_path):
            pass
        assert refused.value.exit_code == LOST_RANK


def test_a_silent_owner_on_another_machine_is_replaced_after_the_timeout(tmp_path):
    with holder(tmp_path) as first:
        first.kill()
        first.wait()
    elsewhere(tmp_path)
    started = time.monotonic()
    with RunLock(tmp_path, stale_after_s=1.5):
        assert 1.5 <= time.monotonic() - started < lock.STALE_AFTER_S


def test_an_empty_lock_is_taken_over(tmp_path):
    lock_path(tmp_path).touch()
    with RunLock(tmp_path, stale_after_s=0.5):
        assert read_lock_owner(lock_path(tmp_path)) is not None


def test_a_stopped_owner_that_lost_the_lock_ends_when_it_continues(tmp_path):
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED, every_s=0.01)
        elsewhere(tmp_path)
        with RunLock(tmp_path, stale_after_s=1):
            first.send_signal(signal.SIGCONT)
            assert first.wait() == LOST_RANK


def test_a_reused_pid_is_another_process(tmp_path):
    own = LockOwner.this_process()
    assert not own.is_gone(own)
    assert replace(own, process_started=own.process_started - 1).is_gone(own)
    assert not replace(own, boot="another").is_gone(own), "the processes of another machine are unknown"


def test_of_two_processes_that_replace_a_dead_owner_one_is_refused(tmp_path):
    with holder(tmp_path) as dead:
        dead.kill()
        dead.wait()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    time.sleep(0.5 + lock.SETTLE_S)
    outputs = [process.communicate() for process in both]
    assert sorted(process.returncode for process in both) in ([0, 0], [0, 1])  # [0, 0]: one ran after the other
    for process, (_, error) in zip(both, outputs, strict=True):
        assert process.returncode == 0 or "is at the stage training" in error


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_lock_is_as_old_as_the_file_servers_clock_says(tmp_path, monkeypatch, ahead_s):
    with holder(tmp_path):
        elsewhere(tmp_path)
        real = time.time
        monkeypatch.setattr(lock.time, "time", lambda: real() + ahead_s)  # this machine's clock is wrong
        os.utime(lock_path(tmp_path))
        with pytest.raises(RunFolderError, match="only one job may use"):
            lock.check_folder(tmp_path)
        os.utime(lock_path(tmp_path), (1, real() - 2 * lock.STALE_AFTER_S))
        lock.check_folder(tmp_path)
