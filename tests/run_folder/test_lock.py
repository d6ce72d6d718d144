"""Two processes and one run folder: the second is refused with the name of the first, and a dead
owner is replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipeline.errors import FOLDER_TAKEN, LOST_RANK, FolderTakenError
from pipeline.run_folder import lock
from pipeline.run_folder.lock import LockOwner, RunLock, living_owner, lock_path, read_lock_owner
from tests.waiting import wait_until

HOLD = """
import sys
from pathlib import Path
from pipeline.errors import FolderTakenError
from pipeline.run_folder import lock
lock.TOUCH_EVERY_S = 0.2
if len(sys.argv) > 2:
    lock.machine_id = lambda: sys.argv[2]
try:
    with lock.RunLock(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
except FolderTakenError as error:
    sys.exit(error.exit_code)
"""


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, *map(str, arguments)]
    pipe, environment = subprocess.PIPE, {**os.environ, **environment}
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


@contextmanager
def lock_owner(folder: Path, *machine: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the lock; on another `machine`, its end is not seen here."""
    with start(folder, *machine, **environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("machine", [[], ["another"]])
def test_the_second_process_is_refused_in_one_line_that_names_the_first(tmp_path, machine):
    with lock_owner(tmp_path, *machine, SLURM_JOB_ID="12", SLURMD_NODENAME="gpu7") as first:
        with pytest.raises(FolderTakenError, match="scancel 12") as refused, RunLock(tmp_path):
            pass
        assert f"job 12 on gpu7 (pid {first.pid}, since 20" in str(refused.value)
        assert refused.value.exit_code == FOLDER_TAKEN and "\n" not in str(refused.value)


def test_a_job_whose_earlier_start_is_alive_exits_with_a_code_that_is_retried(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with lock_owner(tmp_path, SLURM_RESTART_COUNT="1"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        with pytest.raises(FolderTakenError) as refused, RunLock(tmp_path):
            pass
        assert refused.value.exit_code == LOST_RANK


@pytest.mark.parametrize("machine", [[], ["another"], ["unknown"]])
def test_an_owner_that_is_gone_is_replaced_and_a_silent_one_after_a_while(
    tmp_path, monkeypatch, machine
):
    """At once where its end is seen, on this machine."""
    monkeypatch.setattr(lock, "STALE_AFTER_S", 1.5 if machine else 600)
    with lock_owner(tmp_path, *machine) as first:
        first.kill()
        first.wait()
    if machine == ["unknown"]:
        lock_path(tmp_path).write_text("")
    assert (living_owner(lock_path(tmp_path)) is None) == (not machine)
    with RunLock(tmp_path):
        held = read_lock_owner(lock_path(tmp_path))
        assert held is not None and held.pid == os.getpid()
    assert not list(tmp_path.iterdir())


def test_a_stopped_owner_that_lost_the_lock_ends_when_it_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE_AFTER_S", 1)
    with lock_owner(tmp_path, "another") as first:
        first.send_signal(signal.SIGSTOP)
        assert wait_until(
            lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED, every_s=0.01
        )
        with RunLock(tmp_path):
            first.send_signal(signal.SIGCONT)
            assert first.wait() == LOST_RANK


def test_a_reused_pid_and_one_of_another_container_are_other_processes():
    own = LockOwner.this_process()
    dead = own.model_copy(update={"process_started": own.process_started - 1})
    assert not own.is_gone and dead.is_gone
    assert not dead.model_copy(update={"machine": "another"}).is_gone, "unknown"


OF_ANOTHER_USER = """
import os, subprocess, sys
from pathlib import Path
from pipeline.run_folder.lock import LockOwner
owner = LockOwner.model_validate_json(Path(sys.argv[1]).read_bytes())
owner.is_gone  # loads what that user cannot read
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"], check=True)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
assert not Path(f"/proc/{owner.pid}").exists()
print(owner.is_gone)
"""


def test_a_process_that_proc_hides_is_not_gone(tmp_path):
    """One of another user, where /proc is mounted with hidepid=2, as on many clusters."""

    def seen() -> str:
        command = ["unshare", "--mount", sys.executable, "-c", OF_ANOTHER_USER, str(copied)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            pytest.skip(f"mounting /proc needs root: {ran.stderr}")
        return ran.stdout

    copied = tmp_path / "owner.json"
    with lock_owner(tmp_path) as first:
        copied.write_bytes(lock_path(tmp_path).read_bytes())
        assert seen() == "False\n"
        first.kill()
        first.wait()
        assert seen() == "True\n"


def test_of_two_processes_that_replace_a_dead_owner_one_is_refused(tmp_path):
    with lock_owner(tmp_path) as dead:
        dead.kill()
    one = start(tmp_path)
    other = start(tmp_path)
    # The refused one ends by itself; the other holds the folder until its stdin is closed.
    assert wait_until(lambda: one.poll() is not None or other.poll() is not None)
    outputs = []
    for process in (one, other):
        output, _ = process.communicate()
        outputs.append((output, process.returncode))
    assert sorted(outputs) == [("", FOLDER_TAKEN), ("held\n", 0)]


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_lock_is_as_old_as_the_file_servers_clock_says(tmp_path, monkeypatch, ahead_s):
    with lock_owner(tmp_path, "another"):
        real = time.time
        # This machine's clock is wrong.
        monkeypatch.setattr(lock.time, "time", lambda: real() + ahead_s)
        with pytest.raises(FolderTakenError, match="only one job may use"):
            lock.check_folder(tmp_path)
    os.utime(lock_path(tmp_path), (1, real() - 2 * lock.STALE_AFTER_S))
    lock.check_folder(tmp_path)
