"""Launch: a process's rank from its environment, the process group, signals that ask for a stop, and the exit."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import FrameType
from typing import NamedTuple, NoReturn

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from pipeline.config.run import WatchdogSettings
from pipeline.errors import LayoutError, RendezvousError
from pipeline.log import node

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others in a collective, until the run's configuration is read."""

# Each launcher's names for a process's rank, its rank on the node, and the number of processes. OpenMPI comes before
# Slurm, because its mpirun starts its own daemons with srun and their variables reach the processes too.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)
_HOST_COUNTS = ("HOST_COUNT", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")
_ANY_PORT = 0  # torch's store takes a free one
_SIGNALS_AT_ONCE = 4096
_SAME_KEYSTROKE_S = 0.5
"""A launcher may pass on a Ctrl-C that the terminal has sent to every process."""


class Launch(NamedTuple):
    """A process's place among the ranks: what torch and DeepSpeed read from the environment."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int

    @property
    def environment(self) -> dict[str, str]:
        """The same by variable, in capitals. Where one is missing, DeepSpeed asks MPI instead."""
        return {name.upper(): str(value) for name, value in self._asdict().items()}


def read_launch(environment: Mapping[str, str]) -> Launch:
    """This process's place from the variables of torchrun, srun or mpirun; a world of one without them.

    Raises:
        LayoutError: a variable is missing, the world is not the allocation, or an address cannot be reached.
    """
    names = next((names for names in _LAUNCHERS if names[-1] in environment), ())
    rank, local_rank, world_size = [_number(environment, name) for name in names] or (0, 0, 1)
    # A process started without its launcher would train alone, or wait for ranks that nobody starts.
    expected = _number(environment, "EXPECTED_WORLD_SIZE", default=0)
    tasks = _number(
        environment, "SLURM_NTASKS", default=1
    )  # torchrun under srun may start several ranks a task
    if (expected and world_size != expected) or (not expected and world_size < tasks):
        raise LayoutError(
            f"rank {rank} on {node()} is one of {world_size} process(es), but {expected or tasks} were allocated; "
            "start them with slurm/cpt_korean.sh or srun (EXPECTED_WORLD_SIZE overrides)"
        )
    if world_size == 1:
        return Launch(
            0, local_rank, 1, "127.0.0.1", _number(environment, "MASTER_PORT", default=_ANY_PORT)
        )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
        raise LayoutError(
            f"{' and '.join(missing)} not set, and {world_size} processes need a rendezvous; start them with "
            "slurm/cpt_korean.sh, which derives it from the allocation, or set it to the first node's address"
        )
    launch = Launch(
        rank,
        local_rank,
        world_size,
        environment["MASTER_ADDR"],
        _number(environment, "MASTER_PORT"),
    )
    if next((_number(environment, name) for name in _HOST_COUNTS if name in environment), 1) > 1:
        remedy = "set MASTER_ADDR to the first node's address (HOST_COUNT=1 if all nodes are this machine)"
        _check_reachable("MASTER_ADDR", launch.master_addr, remedy)
        if "GLOO_SOCKET_IFNAME" not in environment:
            # gloo listens at the address of the node's own name and sends it to the others: often it is 127.0.1.1.
            remedy = "set NETWORK_INTERFACE in slurm/site.env (or GLOO_SOCKET_IFNAME), or correct its /etc/hosts"
            _check_reachable("the node's own name", socket.gethostname(), remedy)
    return launch


def _check_reachable(what: str, name: str, remedy: str) -> None:
    """Raises LayoutError where other hosts cannot reach the address that this node knows for `name`."""
    try:
        address = resolved(name)
    except OSError as error:
        fault = f"does not resolve ({error})"
    else:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return
        fault = f"is {address}, which other hosts cannot reach"
    raise LayoutError(f"{node()}: {what} {name} {fault}; {remedy}")


def resolved(name: str) -> str:
    """The first address of `name` on this node; raises OSError if there is none."""
    return str(socket.getaddrinfo(name, None)[0][4][0])


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise LayoutError(f"{name}: expected a whole number, found {text or 'nothing'!r}")
    return int(text)


def initialise(launch: Launch) -> torch.device:
    """Joins the ranks through DeepSpeed (NCCL on GPUs, gloo on CPUs) and returns this rank's device.

    Raises:
        LayoutError: the node has fewer GPUs than ranks.
        RendezvousError: the rendezvous port is taken, or cannot be reached.
    """
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"
    os.environ.update(launch.environment)
    os.environ.setdefault(
        "TORCH_GLOO_LAZY_INIT", "1"
    )  # else each group holds a socket to each of a thousand ranks
    # DeepSpeed's engine refuses a LOCAL_RANK that is not mpirun's, as with bound GPUs, or in a shell under mpirun.
    under_mpirun = os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None) is not None
    os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
    from pipeline.training import (
        deepspeed_internals,
    )  # DeepSpeed chooses its accelerator when it is imported

    device = torch.device("cpu")
    if on_gpu:
        bound = under_mpirun or slurm_binds_gpus(os.environ)
        device = torch.device(
            "cuda", device_index(launch.local_rank, torch.cuda.device_count(), bound=bound)
        )
        os.environ["LOCAL_RANK"] = str(
            device.index
        )  # DeepSpeed's engine takes its device from here
        torch.cuda.set_device(device)
    try:
        deepspeed_internals.init_distributed("nccl" if on_gpu else "gloo", COLLECTIVE_TIMEOUT)
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        raise RendezvousError(
            f"rank {launch.rank} on {node()} could not meet the others at "
            f"{launch.master_addr}:{launch.master_port} ({str(error).splitlines()[0]}); another program may use that "
            "port: a requeued job takes another one, or set MASTER_PORT"
        ) from None
    return device


def slurm_binds_gpus(environment: Mapping[str, str]) -> bool:
    """Whether srun may show each task only its own GPUs: --gpus-per-task, or --tres-per-task=gres/gpu:1."""
    return "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get(
        "SLURM_TRES_PER_TASK", ""
    )


def device_index(local_rank: int, visible: int, *, bound: bool) -> int:
    """Which of the `visible` GPUs is this rank's; `bound` says that its launcher may show each only its own."""
    if bound and visible == 1:
        return 0
    if local_rank >= visible:
        raise LayoutError(
            f"{node()}: rank {local_rank} of this node has no GPU, {visible} are visible; "
            f"start at most {visible} processes a node (--ntasks-per-node, or NPROC without Slurm)"
        )
    return local_rank


def extend_collectives(limits: WatchdogSettings) -> timedelta:
    """Lets collectives take longer than the watchdog allows any phase, so that it names the missing rank before gloo or
    NCCL end those that wait for it; returns how long."""
    timeout = max(
        COLLECTIVE_TIMEOUT, timedelta(seconds=2 * max(limits.hung_after_s, limits.slow_after_s))
    )
    _set_pg_timeout(timeout)
    return timeout


def use_deterministic_kernels() -> None:
    """Makes torch and cuBLAS compute the same bits each time, where they can; NCCL needs the user's NCCL_ALGO."""
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # read with the first product, which is yet to come
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise torch would fill memory that is never read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # its backward is not reproducible; flash attention's then is


def leave_after(program: Callable[[], None]) -> NoReturn:
    """Runs `program`, which ends in `sys.exit`, and ends the process with its code, without the interpreter's clean-up:
    threads of DeepSpeed's groups sometimes abort it then, and a finished run would count as failed."""
    code: object = None
    try:
        program()
    except SystemExit as end:
        code = end.code
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            OSError
        ):  # the terminal or the reader is gone; the work may be saved all the same
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class StopSignals:
    """While it is entered, SIGTERM, SIGUSR1 and SIGINT only set `received`, which the loop reads at every step.

    A handler may interrupt a collective, so it does nothing else. A second Ctrl-C ends the process without saving: it
    raises KeyboardInterrupt. Python does that only once the main thread is back from a collective, which it may never
    be; another thread learns of the second Ctrl-C from `is_insistent`.
    """

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handled = _Keystrokes()
        self._arrived = _Keystrokes()
        self._insistent = False

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # Into it the interpreter writes the number of each signal as it arrives, whatever the main thread does.
        self._previous_wakeup = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        self._previous = {number: signal.signal(number, self._receive) for number in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._writer.close()
        self._reader.close()

    def is_insistent(self) -> bool:
        """Whether Ctrl-C was pressed a second time, for one other thread to ask every moment."""
        with contextlib.suppress(OSError):  # nothing has arrived, or the block was left
            for number in self._reader.recv(_SIGNALS_AT_ONCE):
                if number == signal.SIGINT and self._arrived.is_second():
                    self._insistent = True
        return self._insistent

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if number == signal.SIGINT and self._handled.is_second():
            raise KeyboardInterrupt


class _Keystrokes:
    """Distinguishes a second Ctrl-C from one that arrives twice."""

    def __init__(self) -> None:
        self._first = math.inf

    def is_second(self) -> bool:
        """To be called at every SIGINT: whether an earlier one was of another keystroke."""
        now = time.monotonic()
        self._first = min(self._first, now)
        return now - self._first > _SAME_KEYSTROKE_S
