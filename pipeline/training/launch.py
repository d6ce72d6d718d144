"""Launch: a process's rank, the process group, signals that ask for a stop, and the exit."""

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

from pipeline.config.health import WatchdogSettings
from pipeline.errors import LayoutError, RendezvousError
from pipeline.log import node

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others in a collective, until the run's configuration is read."""

# Each launcher's names for a process's rank, its rank on the node, and the number of processes.
# OpenMPI comes before Slurm, because its mpirun starts its own daemons with srun and their
# variables reach the processes too.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)
_HOST_COUNTS = ("HOST_COUNT", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")
_LOCALHOST = "127.0.0.1"
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
        """The environment variables of this place. Where one is missing, DeepSpeed asks MPI."""
        return {name.upper(): str(value) for name, value in self._asdict().items()}


def read_launch(environment: Mapping[str, str]) -> Launch:
    """This process's place, from the variables of torchrun, srun or mpirun.

    Without any of them it is a world of one process.

    Raises:
        LayoutError: a variable is missing, the world is not the allocation, or an address cannot be
            reached.
    """
    rank = 0
    local_rank = 0
    world_size = 1
    for names in _LAUNCHERS:
        if names[-1] in environment:
            rank, local_rank, world_size = [_number(environment, name) for name in names]
            break
    _check_world_size(environment, rank, world_size)
    if world_size == 1:
        port = _number(environment, "MASTER_PORT", default=_ANY_PORT)
        return Launch(0, local_rank, 1, _LOCALHOST, port)

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise LayoutError(
            f"{' and '.join(missing)} not set, and {world_size} processes need a rendezvous; start "
            "them with slurm/cpt_korean.sh, which derives it from the allocation, or set it to the "
            "first node's address"
        )
    address = environment["MASTER_ADDR"]
    port = _number(environment, "MASTER_PORT")
    if _host_count(environment) > 1:
        _check_reachable(
            "MASTER_ADDR",
            address,
            "set MASTER_ADDR to the first node's address (HOST_COUNT=1 if all nodes are this "
            "machine)",
        )
        if "GLOO_SOCKET_IFNAME" not in environment:
            # gloo listens at the address of the node's own name and sends it to the others: often
            # it is 127.0.1.1.
            _check_reachable(
                "the node's own name",
                socket.gethostname(),
                "set NETWORK_INTERFACE in slurm/site.env (or GLOO_SOCKET_IFNAME), or correct its "
                "/etc/hosts",
            )
    return Launch(rank, local_rank, world_size, address, port)


def _check_world_size(environment: Mapping[str, str], rank: int, world_size: int) -> None:
    """Compares the world with the allocation.

    A process started without its launcher would train alone, or wait for ranks that nobody starts.

    Raises:
        LayoutError: the world is smaller than the allocation.
    """
    expected = _number(environment, "EXPECTED_WORLD_SIZE", default=0)
    if expected > 0:
        allocated = expected
        is_right = world_size == expected
    else:
        # torchrun under srun may start several ranks a task.
        allocated = _number(environment, "SLURM_NTASKS", default=1)
        is_right = world_size >= allocated
    if not is_right:
        raise LayoutError(
            f"rank {rank} on {node()} is one of {world_size} process(es), but {allocated} were "
            "allocated; start them with slurm/cpt_korean.sh or srun (EXPECTED_WORLD_SIZE overrides)"
        )


def _host_count(environment: Mapping[str, str]) -> int:
    for name in _HOST_COUNTS:
        if name in environment:
            return _number(environment, name)
    return 1


def _check_reachable(what: str, name: str, remedy: str) -> None:
    """Checks that other hosts can reach the address that this node knows for `name`.

    Raises:
        LayoutError: they cannot.
    """
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
    """The first address that this node knows for `name`.

    Raises:
        OSError: there is none.
    """
    return str(socket.getaddrinfo(name, None)[0][4][0])


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise LayoutError(f"{name}: expected a whole number, found {text or 'nothing'!r}")
    return int(text)


def initialise(launch: Launch) -> torch.device:
    """Joins the ranks through DeepSpeed (NCCL on GPUs, gloo on CPUs); returns this rank's device.

    Raises:
        LayoutError: the node has fewer GPUs than ranks.
        RendezvousError: the rendezvous port is taken, or cannot be reached.
    """
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"
    os.environ.update(launch.environment)
    # Otherwise each group would hold a socket to each of a thousand ranks.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # DeepSpeed's engine refuses a LOCAL_RANK that is not mpirun's, as with bound GPUs, or in a
    # shell under mpirun.
    under_mpirun = os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None) is not None
    os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
    # DeepSpeed chooses its accelerator when it is imported.
    from pipeline.training.deepspeed_internals.lifecycle import init_distributed

    device = torch.device("cpu")
    backend = "gloo"
    if on_gpu:
        bound = under_mpirun or slurm_binds_gpus(os.environ)
        index = device_index(launch.local_rank, torch.cuda.device_count(), bound=bound)
        device = torch.device("cuda", index)
        backend = "nccl"
        # DeepSpeed's engine takes its device from here.
        os.environ["LOCAL_RANK"] = str(index)
        torch.cuda.set_device(device)
    try:
        init_distributed(backend, COLLECTIVE_TIMEOUT)
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        raise RendezvousError(
            f"rank {launch.rank} on {node()} could not meet the others at "
            f"{launch.master_addr}:{launch.master_port} ({str(error).splitlines()[0]}); another "
            "program may use that port: a requeued job takes another one, or set MASTER_PORT"
        ) from None
    return device


def slurm_binds_gpus(environment: Mapping[str, str]) -> bool:
    """Whether srun may show each task only its own GPUs.

    It does with --gpus-per-task, or --tres-per-task=gres/gpu:1.
    """
    tres_per_task = environment.get("SLURM_TRES_PER_TASK", "")
    return "SLURM_GPUS_PER_TASK" in environment or "gpu" in tres_per_task


def device_index(local_rank: int, visible: int, *, bound: bool) -> int:
    """Which of the `visible` GPUs is this rank's.

    Args:
        bound: whether its launcher may show each rank only its own GPU.

    Raises:
        LayoutError: there is no GPU for it.
    """
    if bound and visible == 1:
        return 0
    if local_rank >= visible:
        raise LayoutError(
            f"{node()}: rank {local_rank} of this node has no GPU, {visible} are visible; "
            f"start at most {visible} processes a node (--ntasks-per-node, or NPROC without Slurm)"
        )
    return local_rank


def extend_collectives(limits: WatchdogSettings) -> timedelta:
    """Lets collectives take longer than the watchdog allows any phase; returns how long.

    The watchdog then names the missing rank before gloo or NCCL end the ranks that wait for it.
    """
    longest_phase_s = max(limits.hung_after_s, limits.slow_after_s)
    timeout = max(COLLECTIVE_TIMEOUT, timedelta(seconds=2 * longest_phase_s))
    # torch has no public way to change the default group's timeout, which was set before the
    # configuration was read.
    _set_pg_timeout(timeout)
    return timeout


def use_deterministic_kernels() -> None:
    """Makes torch and cuBLAS compute the same bits each time, where they can.

    NCCL needs the user's NCCL_ALGO for it.
    """
    # It is read with the first matrix product, which is yet to come.
    # Several streams that share a workspace make cuBLAS choose between kernels at run time; with a
    # fixed one of its own, each has the same sums (NVIDIA, cuBLAS, Results reproducibility).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Only a warning where an operation has no deterministic kernel: the run is then still
    # reproducible in the others.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise torch would fill memory that is never read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Its backward pass is not reproducible; flash attention's then is.
    torch.backends.cuda.enable_cudnn_sdp(False)


def leave_after(program: Callable[[], None]) -> NoReturn:
    """Runs `program`, which ends in `sys.exit`, and ends the process with its exit code.

    The interpreter's clean-up is left out: threads of DeepSpeed's groups sometimes abort it, and a
    finished run would count as failed.
    """
    code: object = None
    try:
        program()
    except SystemExit as end:
        code = end.code
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The terminal or the reader may be gone; the work may be saved all the same.
        with contextlib.suppress(OSError):
            stream.flush()
    if isinstance(code, int):
        os._exit(code)
    os._exit(0 if code is None else 1)


class StopSignals:
    """While it is entered, SIGTERM, SIGUSR1 and SIGINT only set `received`.

    The training loop reads it at every step. A handler may interrupt a collective, so it does
    nothing else.

    A second Ctrl-C ends the process without saving: the handler raises KeyboardInterrupt. Python
    runs it only when the main thread is back from a collective, and it may never be back. Another
    thread therefore learns of the second Ctrl-C from `is_insistent`.
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
        # The interpreter writes the number of each signal into it as the signal arrives, whatever
        # the main thread does.
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
        """Whether Ctrl-C was pressed a second time; one other thread may poll it."""
        # An OSError: nothing has arrived, or the block was left.
        with contextlib.suppress(OSError):
            for number in self._reader.recv(_SIGNALS_AT_ONCE):
                if number == signal.SIGINT and self._arrived.is_second():
                    self._insistent = True
        return self._insistent

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if number == signal.SIGINT and self._handled.is_second():
            raise KeyboardInterrupt


class _Keystrokes:
    """Distinguishes a second Ctrl-C from the same one that arrives twice."""

    def __init__(self) -> None:
        self._first = math.inf

    def is_second(self) -> bool:
        """Whether an earlier SIGINT was of another keystroke; called at every SIGINT."""
        now = time.monotonic()
        self._first = min(self._first, now)
        return now - self._first > _SAME_KEYSTROKE_S
