"""A real Slurm cluster of two nodes on this machine, for tests and for experiments by hand.

    python -m tests.slurm.cluster      starts a cluster, says how to use it, and stops it at Ctrl-D

It has its own munged, slurmctld and two slurmds, on free ports and in one temporary folder. It does
not use the machine's daemons or /etc/slurm. It needs root, as slurmd does. Two `NodeName` lines on
one address with different ports make two nodes; each has its own `slurmd -N name`.
"""

# ruff: noqa: T201  (also a command line)
from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from pipeline.local_ranks import reserved_port
from tests.waiting import PATIENCE_S, wait_until

NODES = ("n1", "n2")
FINAL_STATES = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
}
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CPUS_PER_NODE = 16
"""More than the machine has: most of the tests' jobs wait, and run at the same time."""

# FirstJobId: jobs meet on ports made from their numbers; another cluster on this machine should
# have others.
# MessageTimeout: how many seconds a command waits for a daemon that is busy.
_SLURM_CONF = """\
ClusterName=scale-cpt-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=2
PropagateResourceLimits=NONE
ReturnToService=2
MessageTimeout=60
MinJobAge=86400
FirstJobId={first_job}
SlurmdTimeout=20
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class ClusterError(Exception):
    """The cluster did not do what a test relies on."""


class JobEnd(NamedTuple):
    """How a job ended.

    Slurm's state, the batch script's exit code as a shell sees it, and how often it was requeued.
    """

    state: str
    exit_code: int
    restarts: int


def unsupported_reason() -> str | None:
    """Why a cluster cannot start on this machine; None if it can."""
    if os.geteuid() != 0:
        return "slurmd needs root: run the tests as root, in a container for example"
    absent = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed: run `make slurm` (on Debian or Ubuntu, as root)"
    return None


class Cluster:
    """The jobs of a running cluster, whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, pointed at this cluster and cleared of any other's."""
        environment = {}
        for name, value in os.environ.items():
            if not name.startswith(("SLURM_", "SBATCH_")):
                environment[name] = value
        environment["SLURM_CONF"] = str(self.conf)
        return environment

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Runs a command with `env` and this cluster's environment; returns its standard output."""
        environment = self.environment | env
        result = subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise ClusterError(
                f"{' '.join(command)} ended with {result.returncode}: "
                f"{result.stderr}{result.stdout}"
            )
        return result.stdout

    def scontrol(self, *args: str) -> str:
        return self.run("scontrol", *args)

    def sbatch(self, *args: str | Path, cwd: Path | None = None, **env: str) -> int:
        """Submits a job from the folder `cwd`; returns its id."""
        return int(self.run("sbatch", "--parsable", *map(str, args), cwd=cwd, **env))

    def job(self, job_id: int) -> dict[str, str]:
        """What `scontrol show job` says, under its own names (JobState, Restarts, StdOut…)."""
        fields = self.scontrol("show", "job", str(job_id), "--oneliner").split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def output(self, job_id: int) -> str:
        """What the job has printed so far."""
        path = Path(self.job(job_id)["StdOut"])
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def evidence(self, job_id: int) -> str:
        """Output, Slurm's record and the end of the daemons' logs, for a failed test's message."""
        parts = [self.output(job_id), self.scontrol("show", "job", str(job_id))]
        for log in sorted(self.folder.glob("*.log")):
            parts.append(log.read_text(errors="replace")[-2000:])
        return "\n".join(parts)

    def wait(self, job_id: int, timeout: float = PATIENCE_S) -> JobEnd:
        """Waits until the job has ended for good, requeues included."""
        job = self.wait_for(job_id, lambda job: job["JobState"] in FINAL_STATES, timeout)
        # Slurm gives the exit code and the signal apart; a shell gives 128 + the signal.
        exit_code, killed_by = map(int, job["ExitCode"].split(":"))
        if exit_code == 0 and killed_by != 0:
            exit_code = 128 + killed_by
        return JobEnd(job["JobState"], exit_code, int(job["Restarts"]))

    def wait_for(
        self, job_id: int, condition: Callable[[dict[str, str]], bool], timeout: float = PATIENCE_S
    ) -> dict[str, str]:
        """Waits until `condition` holds for what `job` returns, and returns that.

        Raises:
            ClusterError: It did not hold in time, or a slurmd crashed meanwhile.
        """
        crashes = self.slurmd_restarts

        def is_over() -> bool:
            # A job of a slurmd that crashed need not come to its end.
            return self.slurmd_restarts > crashes or condition(self.job(job_id))

        if not wait_until(is_over, timeout):
            raise ClusterError(f"after {timeout} s\n{self.evidence(job_id)}")
        if self.slurmd_restarts > crashes:
            raise ClusterError(f"a slurmd crashed\n{self.evidence(job_id)}")
        return self.job(job_id)

    def wait_for_output(self, job_id: int, text: str, count: int = 1) -> None:
        """Waits until the job has printed `text` `count` times."""
        self.wait_for(job_id, lambda _: self.output(job_id).count(text) >= count)

    def start_now(self, job_id: int) -> None:
        """Starts a requeued job after five seconds instead of Slurm's two minutes.

        Not earlier: slurmd refuses credentials from the second in which it revoked those of the
        attempt before. On a busy machine the signal that ends that attempt may also come late, and
        would end the new one.
        """
        self.wait_for(job_id, lambda job: job["JobState"] == "PENDING")
        self.scontrol("update", f"JobId={job_id}", "StartTime=now+5")

    @property
    def slurmd_restarts(self) -> int:
        """How often a slurmd ended, and was started again.

        The slurmd of Slurm 22.05 crashes once in many launches.
        """
        restarts = self.folder / "restarts"
        return restarts.stat().st_size if restarts.exists() else 0

    def slurmd(self, node: str) -> psutil.Process:
        """The node's daemon. Its job steps have daemons of their own, which outlive it."""
        return psutil.Process(int((self.folder / f"slurmd.{node}.pid").read_text(encoding="utf-8")))

    def restart_slurmd(self, node: str) -> None:
        """Kills the node's daemon, as when the node dies; returns when another was started."""
        before = self.slurmd_restarts
        self.slurmd(node).kill()
        if not wait_until(lambda: self.slurmd_restarts > before):
            raise ClusterError(f"{node}: no slurmd was started again")


@contextlib.contextmanager
def guarded_cluster() -> Iterator[Cluster]:
    """A cluster that a process of its own holds, which removes it even if this one is killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.cluster"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the tests; the guard follows when they let go of its stdin.
        start_new_session=True,
    ) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        _, _, conf = guard.stdout.readline().strip().partition("=")
        if not conf:
            raise ClusterError("the cluster did not start; its guard's lines above say why")
        yield Cluster(Path(conf).parent)


class Daemons:
    """A cluster's daemons, children of this process.

    Each is started again when it ends, as a service manager does.
    """

    def __init__(self, cluster: Cluster, ports: Sequence[int]) -> None:
        self._cluster = cluster
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        folder = cluster.folder
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        cluster.conf.write_text(_slurm_conf(folder, *ports), encoding="utf-8")
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        munged = ["munged", "--foreground", "--force"]
        munged += [f"--key-file={key}", f"--socket={folder / 'munge.socket'}"]
        munged += [f"--pid-file={folder / 'munged.pid'}", f"--log-file={folder / 'munged.log'}"]
        munged += [f"--seed-file={folder / 'munged.seed'}"]
        self._commands = {"munged": munged, "slurmctld": ["slurmctld", "-D"]}
        for node in NODES:
            self._commands[node] = ["slurmd", "-D", "-N", node]

    def keep(self) -> None:
        """Starts those that do not run, and lets orphans of ended ones go."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    process.wait()
        for name, (program, *options) in self._commands.items():
            before = self._running.get(name)
            if before is not None and before.poll() is None:
                continue
            # A slurmd that crashed leaves its file.
            (self._cluster.folder / f"slurmd.{name}.pid").unlink(missing_ok=True)
            command = [shutil.which(program, path=_PATH) or program, *options]
            with (self._cluster.folder / "start.log").open("ab") as log:
                self._running[name] = subprocess.Popen(
                    command,
                    env=self._cluster.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            if before is not None and name in NODES:
                with (self._cluster.folder / "restarts").open("ab") as restarts:
                    restarts.write(b"|")

    def are_ready(self) -> bool:
        """Whether both nodes can take jobs."""
        self.keep()
        try:
            nodes = self._cluster.scontrol("show", "nodes", "--oneliner")
        except ClusterError:
            return False  # slurmctld does not answer yet
        return nodes.count(" State=IDLE ") == len(NODES)

    def stop(self) -> None:
        """Ends jobs, daemons and all they started, and removes the folder."""
        with contextlib.suppress(ClusterError):
            self._cluster.run("scancel", "--signal=KILL", "--full", "--user=root")
            self._cluster.run("scancel", "--user=root")
            wait_until(lambda: not self._cluster.run("squeue", "--noheader").strip(), 60)
        # Again: what is killed may have started another process meanwhile.
        while started := psutil.Process().children(recursive=True):
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(started, timeout=10)
        shutil.rmtree(self._cluster.folder, ignore_errors=True)


def _slurm_conf(folder: Path, controller_port: int, *node_ports: int) -> str:
    host = socket.gethostname()
    described = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={_CPUS_PER_NODE} RealMemory=2000"
    nodes = []
    for node, port in zip(NODES, node_ports, strict=True):
        nodes.append(f"NodeName={node} {described} Port={port}")
    first_job = controller_port % 14_000 + 1
    return _SLURM_CONF.format(
        folder=folder, host=host, port=controller_port, first_job=first_job, nodes="\n".join(nodes)
    )


def main() -> int:
    """Starts a cluster, prints how to use it, and keeps it until stdin ends."""
    if reason := unsupported_reason():
        print(f"no cluster: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # PR_SET_CHILD_SUBREAPER: processes that outlive a daemon of this cluster become children of
    # this process.
    ctypes.CDLL(None).prctl(36, 1)
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="scale-cpt-slurm-")))
    with contextlib.ExitStack() as held:
        # One for slurmctld, one for each slurmd; held so that a daemon that is killed finds its
        # port again.
        ports = [held.enter_context(reserved_port()) for _ in range(1 + len(NODES))]
        daemons = Daemons(cluster, ports)
        held.callback(daemons.stop)
        if not wait_until(daemons.are_ready):
            print(f"no cluster: {cluster.folder}: the daemons are not ready", file=sys.stderr)
            return 1
        print(f"export SLURM_CONF={cluster.conf}", flush=True)
        # Until stdin ends; a first line that someone types does not end it.
        while not (select.select([sys.stdin], [], [], 1)[0] and not sys.stdin.readline()):
            daemons.keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
