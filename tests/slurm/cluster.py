"""A real Slurm cluster of two nodes on this machine, for tests and for experiments by hand.

    python -m tests.slurm.cluster        starts a cluster, prints how to use it, and stops it at Ctrl-D

It has its own munged, slurmctld and two slurmds, on free ports and in one temporary folder. It does not use the
machine's daemons or /etc/slurm. It needs root, as slurmd does.
"""

# ruff: noqa: T201  (also a command line)
from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pipeline.local_ranks import reserved_port
from tests.slurm.daemons import NODES, PORTS, ClusterError, Daemons, SlurmdCrashedError, why_not
from tests.waiting import PATIENCE_S, wait_until

FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
_USABLE_STATES = {"IDLE", "MIXED", "ALLOCATED"}


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: Slurm's state, the batch script's exit code as a shell sees it, how often it was requeued."""

    state: str
    exit_code: int
    restarts: int


class Cluster(Daemons):
    """A running cluster, identified by the folder that holds all its files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.crashes = 0
        """How often a slurmd ended that nobody had ended."""
        self._revival = threading.Lock()

    def sbatch(
        self, script: Path, env: Mapping[str, str] | None = None, args: tuple[str, ...] = (), cwd: Path | None = None
    ) -> int:
        """Submits `script` from the folder `cwd` with `env` added to the environment; returns the job's id."""
        return int(self.run("sbatch", "--parsable", *args, str(script), env=env, cwd=cwd))

    def wait(self, job_id: int, timeout: float = PATIENCE_S) -> JobEnd:
        """Waits until the job has ended for good, requeues included."""
        job = self.wait_for(job_id, lambda job: job["JobState"] in FINAL_STATES, timeout)
        code, killed_by = map(int, job["ExitCode"].split(":"))
        return JobEnd(job["JobState"], code or (128 + killed_by if killed_by else 0), int(job["Restarts"]))

    def wait_for(
        self, job_id: int, condition: Callable[[dict[str, str]], bool], timeout: float = PATIENCE_S
    ) -> dict[str, str]:
        """Waits until `condition` holds for what `job` returns, and returns that.

        Raises:
            ClusterError: it did not hold in time.
            SlurmdCrashedError: a slurmd crashed meanwhile, as a node that dies; it is running again.
        """
        crashes = self.crashes

        def over() -> bool:
            self._revive()
            return self.crashes > crashes or condition(self.job(job_id))

        if not wait_until(over, timeout):
            raise ClusterError(f"after {timeout} s\n{self.evidence(job_id)}")
        if self.crashes > crashes:
            raise SlurmdCrashedError(f"a slurmd crashed\n{self.evidence(job_id)}")
        return self.job(job_id)

    def wait_for_output(self, job_id: int, text: str, count: int = 1) -> None:
        """Waits until the job has printed `text` `count` times."""
        self.wait_for(job_id, lambda _: self.output(job_id).count(text) >= count)

    def job(self, job_id: int) -> dict[str, str]:
        """What `scontrol show job` says, under its own names (JobState, Restarts, StdOut…)."""
        fields = self.scontrol("show", "job", str(job_id), "--oneliner").split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def output(self, job_id: int) -> str:
        """What the job has printed so far."""
        path = Path(self.job(job_id)["StdOut"])
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def evidence(self, job_id: int) -> str:
        """Output, Slurm's record and the daemons' logs, for the message of a failed test."""
        return "\n".join((self.output(job_id), self.scontrol("show", "job", str(job_id)), self.logs()))

    def start_now(self, job_id: int) -> None:
        """Starts a requeued job after five seconds instead of Slurm's two minutes.

        Not earlier: slurmd refuses credentials from the second in which it revoked those of the attempt before. On a
        busy machine the signal that ends that attempt may also come late, and would end the new one.
        """
        self.wait_for(job_id, lambda job: job["JobState"] == "PENDING")
        self.scontrol("update", f"JobId={job_id}", "StartTime=now+5")

    def start_slurmd(self, node: str) -> None:
        """Starts the node's daemon and waits until Slurm can use the node."""
        began = datetime.now()
        (self.folder / f"slurmd.{node}.pid").unlink(missing_ok=True)  # of one that crashed
        self._start("slurmd", "-N", node)
        self._wait_until_usable(node, began)

    def _wait_until_usable(self, node: str, began: datetime) -> None:
        """Waits until a daemon that started after `began` is registered; an earlier one may still look usable."""

        def usable() -> bool:
            shown = self.scontrol("show", "node", node, "--oneliner")
            started = re.search(r" SlurmdStartTime=(\d\S+)", shown)
            if started is None or datetime.fromisoformat(started[1]) < began.replace(microsecond=0):
                return False
            return any(f"State={state} " in shown for state in _USABLE_STATES)

        if not wait_until(usable):
            raise ClusterError(f"{self.scontrol('show', 'node', node)}\n{self.logs()}")

    def _revive(self) -> None:
        """Starts each slurmd that crashed, as the service manager of a real node would."""
        with self._revival:
            for node in self.crashed():
                self.crashes += 1
                self.start_slurmd(node)

    def start_controller(self) -> None:
        """Restarts slurmctld with its saved state, and waits until it answers."""
        self._start("slurmctld")
        self._await_controller()

    def _await_controller(self) -> None:
        if not wait_until(self._controller_answers):
            raise ClusterError(f"slurmctld does not answer\n{self.logs()}")

    def scontrol(self, *args: str) -> str:
        return self.run("scontrol", *args)

    def run(self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Runs a command with this cluster's environment and returns its standard output."""
        environment = {**self.environment, **(env or {})}
        result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ClusterError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr}{result.stdout}")
        return result.stdout

    def start(self, ports: Sequence[int]) -> None:
        """Starts the daemons on these ports; returns when both nodes are idle."""
        began = datetime.now()
        self.start_all(ports)
        self._await_controller()
        for node in NODES:
            self._wait_until_usable(node, began)

    def stop(self) -> None:
        """Ends jobs and daemons and all they started, and removes the folder."""
        with contextlib.suppress(ClusterError):
            self.run("scancel", "--signal=KILL", "--full", "--user=root")
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "--noheader").strip(), 60)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _controller_answers(self) -> bool:
        with contextlib.suppress(ClusterError):
            return "is UP" in self.scontrol("ping")
        return False


@contextlib.contextmanager
def guarded_cluster() -> Iterator[Cluster]:
    """A cluster that a process of its own holds, which removes it even if this one is killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.cluster"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the tests; the guard follows when they let go of its stdin
    ) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        _, _, conf = guard.stdout.readline().strip().partition("=")
        if not conf:
            raise ClusterError("the cluster did not start; its guard's lines above say why")
        yield Cluster(Path(conf).parent)


def main() -> int:
    """Starts a cluster, prints how to use it, and keeps it until stdin ends."""
    if reason := why_not():
        print(f"no cluster: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="scale-cpt-slurm-")))
    try:
        with contextlib.ExitStack() as held:  # a daemon that is killed shall find its port again
            cluster.start([held.enter_context(reserved_port()) for _ in range(PORTS)])
            print(f"export SLURM_CONF={cluster.conf}", flush=True)
            sys.stdin.read()
    except ClusterError as error:
        print(f"no cluster: {error}", file=sys.stderr)
        return 1
    finally:
        cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
