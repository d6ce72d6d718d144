"""A real Slurm cluster of two nodes on this machine, for tests and for experiments by hand.

    python -m tests.slurm.cluster        starts a cluster, prints how to use it, and stops it at Ctrl-D

It has its own munged, slurmctld and two slurmds, on free ports and in one temporary folder. It does not use the
machine's daemons or /etc/slurm. It needs root, as slurmd does. Two `NodeName` lines on one address with different ports
make two nodes; each has its own `slurmd -N name`.
"""

# ruff: noqa: T201  (also a command line)
from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil

from pipeline.local_ranks import reserved_port
from tests.waiting import PATIENCE_S, wait_until

NODES = ("n1", "n2")
FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
MESSAGE_TIMEOUT = "MessageTimeout=60"
"""How many seconds a command waits for a daemon that is busy."""
_DAEMONS = ("munged", "slurmctld", "slurmd")
_CPUS_PER_NODE = 16
"""More than the machine has: most of the tests' jobs wait, and run at the same time."""

_SLURM_CONF = """\
ClusterName=scale-cpt-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
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
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
PropagateResourceLimits=NONE
ReturnToService=2
JobRequeue=1
{message_timeout}
MinJobAge=86400
FirstJobId={first_job_id}
SlurmdTimeout=20
{nodes}
PartitionName=all Nodes={node_names} Default=YES MaxTime=INFINITE State=UP
"""


class ClusterError(Exception):
    """The cluster did not do what a test relies on."""


class SlurmdCrashedError(ClusterError):
    """A slurmd ended that nobody had ended, and was started again. Slurm 22.05's does so once in many launches."""


class JobEnd(NamedTuple):
    """How a job ended: Slurm's state, the batch script's exit code as a shell sees it, how often it was requeued."""

    state: str
    exit_code: int
    restarts: int


def why_not() -> str | None:
    """Why a cluster cannot start on this machine; None if it can."""
    if os.geteuid() != 0:
        return "slurmd needs root: run the tests as root, in a container for example"
    absent = [program for program in (*_DAEMONS, "sbatch", "srun", "scontrol", "scancel") if _find(program) is None]
    return f"{', '.join(absent)} not installed: run `make slurm` (on Debian or Ubuntu, as root)" if absent else None


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    """The daemons, with all files in `folder`, and the jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.crashes = 0
        """How often a slurmd ended that nobody had ended."""
        self._revival = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, pointed at this cluster and cleared of any other's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "SLURM_CONF": str(self.conf)}

    # --- Jobs

    def run(self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Runs a command with this cluster's environment and returns its standard output."""
        environment = {**self.environment, **(env or {})}
        result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ClusterError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr}{result.stdout}")
        return result.stdout

    def scontrol(self, *args: str) -> str:
        return self.run("scontrol", *args)

    def sbatch(
        self, script: Path, env: Mapping[str, str] | None = None, args: tuple[str, ...] = (), cwd: Path | None = None
    ) -> int:
        """Submits `script` from the folder `cwd` with `env` added to the environment; returns the job's id."""
        return int(self.run("sbatch", "--parsable", *args, str(script), env=env, cwd=cwd))

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
        return "\n".join((self.output(job_id), self.scontrol("show", "job", str(job_id)), self._logs()))

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

    def start_now(self, job_id: int) -> None:
        """Starts a requeued job after five seconds instead of Slurm's two minutes.

        Not earlier: slurmd refuses credentials from the second in which it revoked those of the attempt before. On a
        busy machine the signal that ends that attempt may also come late, and would end the new one.
        """
        self.wait_for(job_id, lambda job: job["JobState"] == "PENDING")
        self.scontrol("update", f"JobId={job_id}", "StartTime=now+5")

    # --- Daemons

    def start(self, ports: Sequence[int]) -> None:
        """Starts the daemons, each on one of these ports; returns when both nodes are idle."""
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        self._write_conf(*ports)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = {**files, "seed-file": "munged.seed"}.items()
        self._start("munged", "--force", *(f"--{option}={self.folder / name}" for option, name in options))
        self.start_controller("-c")
        for node in NODES:
            self.start_slurmd(node)

    def _write_conf(self, controller_port: int, *node_ports: int) -> None:
        host, at = socket.gethostname(), f"NodeAddr=127.0.0.1 CPUs={_CPUS_PER_NODE} RealMemory=2000"
        nodes = [
            f"NodeName={node} NodeHostname={host} {at} Port={port}"
            for node, port in zip(NODES, node_ports, strict=True)
        ]
        text = _SLURM_CONF.format(
            folder=self.folder,
            host=host,
            controller_port=controller_port,
            # Jobs meet on ports made from their numbers: another cluster on this machine should have others.
            first_job_id=controller_port % 14_000 + 1,
            message_timeout=MESSAGE_TIMEOUT,
            nodes="\n".join(nodes),
            node_names=",".join(NODES),
        )
        self.conf.write_text(text, encoding="utf-8")

    def start_controller(self, *options: str) -> None:
        """Starts slurmctld, with its saved state if there is one, and waits until it answers."""

        def answers() -> bool:
            with contextlib.suppress(ClusterError):
                return "is UP" in self.scontrol("ping")
            return False

        self._start("slurmctld", *options)
        if not wait_until(answers):
            raise ClusterError(f"slurmctld does not answer\n{self._logs()}")

    def stop_controller(self) -> None:
        """Ends slurmctld in good order, as for an upgrade; the jobs run on."""
        self._end("slurmctld.pid", signal.SIGTERM)

    def start_slurmd(self, node: str) -> None:
        """Starts the node's daemon and waits until Slurm can use the node; an earlier daemon may still look usable."""
        began = datetime.now().replace(microsecond=0)

        def usable() -> bool:
            shown = self.scontrol("show", "node", node, "--oneliner")
            started = re.search(r" SlurmdStartTime=(\d\S+)", shown)
            is_new = started is not None and datetime.fromisoformat(started[1]) >= began
            return is_new and re.search(" State=(IDLE|MIXED|ALLOCATED) ", shown) is not None

        (self.folder / f"slurmd.{node}.pid").unlink(missing_ok=True)  # of one that crashed
        self._start("slurmd", "-N", node)
        if not wait_until(usable):
            raise ClusterError(f"{self.scontrol('show', 'node', node)}\n{self._logs()}")

    def kill_slurmd(self, node: str) -> None:
        """Kills the node's daemon, as when the node dies. Its job steps have daemons of their own, and survive."""
        self._end(f"slurmd.{node}.pid", signal.SIGKILL)

    def _revive(self) -> None:
        """Starts each slurmd that left its pid file behind, as the service manager of a real node would."""
        with self._revival:
            for node in NODES:
                if (self.folder / f"slurmd.{node}.pid").exists() and not self._runs(node):
                    self.crashes += 1
                    self.start_slurmd(node)

    def _runs(self, node: str) -> bool:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            daemon = psutil.Process(int((self.folder / f"slurmd.{node}.pid").read_text(encoding="utf-8")))
            return daemon.name() == "slurmd" and daemon.status() != psutil.STATUS_ZOMBIE
        return False

    def _end(self, pid_file: str, how: signal.Signals) -> None:
        daemon = psutil.Process(int((self.folder / pid_file).read_text(encoding="utf-8")))
        (self.folder / pid_file).unlink()  # first: `_revive` is about those that end without being told to
        daemon.send_signal(how)
        daemon.wait(timeout=PATIENCE_S)

    def _start(self, program: str, *args: str) -> None:
        with (self.folder / "start.log").open("ab") as log:
            command, none = [_find(program) or program, *args], subprocess.DEVNULL
            result = subprocess.run(command, env=self.environment, stdin=none, stdout=log, stderr=log, check=False)
        if result.returncode != 0:
            raise ClusterError(f"{program} ended with {result.returncode}\n{self._logs()}")

    def _logs(self) -> str:
        """The end of every daemon's log."""
        logs = {log.name: log.read_text(errors="replace").splitlines() for log in sorted(self.folder.glob("*.log"))}
        return "\n".join(line for name, lines in logs.items() for line in (f"--- {name}", *lines[-15:]))

    def stop(self) -> None:
        """Ends jobs and daemons and all they started, and removes the folder."""
        with contextlib.suppress(ClusterError):
            self.run("scancel", "--signal=KILL", "--full", "--user=root")
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "--noheader").strip(), 60)
        wait_until(self._all_killed)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _all_killed(self) -> bool:
        """Kills this cluster's daemons and job steps, identified by their environment; whether there were none."""
        doomed: list[psutil.Process] = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                is_daemon = process.info["name"] in (*_DAEMONS, "slurmstepd")
                if is_daemon and process.environ().get("SLURM_CONF") == str(self.conf):
                    doomed += [process, *process.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, timeout=10)
        return not doomed


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
            cluster.start([held.enter_context(reserved_port()) for _ in ("controller", *NODES)])
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
