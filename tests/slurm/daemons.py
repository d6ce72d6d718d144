"""The daemons of a two-node Slurm on one machine: its configuration, starting them, and leaving nothing behind.

Two `NodeName` lines on one address with different ports make two nodes; each has its own `slurmd -N name`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.waiting import PATIENCE_S, wait_until

NODES = ("n1", "n2")
PORTS = 1 + len(NODES)
CPUS_PER_NODE = 16
"""More than the machine has: most of the tests' jobs wait, and run at the same time."""
MESSAGE_TIMEOUT = "MessageTimeout=60"
"""How many seconds a command waits for a daemon that is busy."""
_PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd")
_COMMANDS = ("sbatch", "srun", "scontrol", "scancel")

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


def why_not() -> str | None:
    """Why a cluster cannot start on this machine; None if it can."""
    if os.geteuid() != 0:
        return "slurmd needs root: run the tests as root, in a container for example"
    absent = [program for program in (*_PROGRAMS[:3], *_COMMANDS) if _find(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed: run `make slurm` (on Debian or Ubuntu, as root)"
    return None


class SlurmdCrashedError(ClusterError):
    """A slurmd ended that nobody had ended, and was started again. Slurm 22.05's does so once in many launches."""


class Daemons:
    """munged, slurmctld and one slurmd per node, with all files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, pointed at this cluster and cleared of any other's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "SLURM_CONF": str(self.conf)}

    def start_all(self, ports: Sequence[int]) -> None:
        """Writes the configuration and starts every daemon, on a port of its own: `PORTS` in all."""
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        self.conf.write_text(_configuration(self.folder, ports), encoding="utf-8")
        self._start_munged()
        self._start("slurmctld", "-c")
        for node in NODES:
            self._start("slurmd", "-N", node)

    def stop_controller(self) -> None:
        """Ends slurmctld in good order, as for an upgrade; the jobs run on."""
        self._end("slurmctld.pid", signal.SIGTERM)

    def kill_slurmd(self, node: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends the node's daemon, as when the node dies. Its job steps have daemons of their own, and survive."""
        self._end(f"slurmd.{node}.pid", how)

    def crashed(self) -> list[str]:
        """The nodes whose slurmd left its pid file behind: it ended neither by itself nor by `kill_slurmd`."""
        return [node for node in NODES if (self.folder / f"slurmd.{node}.pid").exists() and not self._runs(node)]

    def kill(self) -> None:
        """Kills every daemon with all that it started, and what they start meanwhile."""
        wait_until(self._all_killed)

    def logs(self) -> str:
        """The end of every daemon's log."""
        return "\n".join(f"--- {log.name}\n{_tail(log)}" for log in sorted(self.folder.glob("*.log")))

    def _all_killed(self) -> bool:
        """Whether there was nothing to kill."""
        doomed: list[psutil.Process] = []
        for daemon in self._running():
            with suppress(psutil.NoSuchProcess):
                doomed += [daemon, *daemon.children(recursive=True)]
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, timeout=10)
        return not doomed

    def _running(self) -> Iterator[psutil.Process]:
        """This cluster's daemons and job steps, identified by their environment."""
        for process in psutil.process_iter(["name"]):
            with suppress(psutil.Error):
                if process.info["name"] in _PROGRAMS and process.environ().get("SLURM_CONF") == str(self.conf):
                    yield process

    def _runs(self, node: str) -> bool:
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            daemon = psutil.Process(int((self.folder / f"slurmd.{node}.pid").read_text(encoding="utf-8")))
            return daemon.name() == "slurmd" and daemon.status() != psutil.STATUS_ZOMBIE
        return False

    def _end(self, pid_file: str, how: signal.Signals) -> None:
        daemon = psutil.Process(int((self.folder / pid_file).read_text(encoding="utf-8")))
        (self.folder / pid_file).unlink()  # first: `crashed` is about those that end without being told to
        daemon.send_signal(how)
        daemon.wait(timeout=PATIENCE_S)

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {
            "key-file": key.name,
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        self._start("munged", "--force", *(f"--{option}={self.folder / name}" for option, name in files.items()))

    def _start(self, program: str, *args: str) -> None:
        with (self.folder / "start.log").open("ab") as log:
            result = subprocess.run(
                [_find(program) or program, *args],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            )
        if result.returncode != 0:
            raise ClusterError(f"{program} ended with {result.returncode}\n{self.logs()}")


def _configuration(folder: Path, ports: Sequence[int]) -> str:
    controller_port, *node_ports = ports
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} RealMemory=2000"
        for node, port in zip(NODES, node_ports, strict=True)
    )
    return _SLURM_CONF.format(
        folder=folder,
        host=host,
        controller_port=controller_port,
        # Jobs meet on ports made from their numbers: another cluster on this machine should have others.
        first_job_id=controller_port % 14_000 + 1,
        message_timeout=MESSAGE_TIMEOUT,
        nodes=nodes,
        node_names=",".join(NODES),
    )


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
