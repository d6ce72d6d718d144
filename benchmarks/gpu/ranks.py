"""Two processes: tensor parallelism against one process, and the watchdog where one is lost."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.setting import CheckRow, Setting, largest_error, started
from pipeline import log
from pipeline.config.health import WatchdogSettings as Limits
from pipeline.config.method import FullFineTuning
from pipeline.errors import LOST_RANK
from pipeline.health.phases import Phases
from pipeline.health.watchdog import RankWatchdog
from pipeline.local_ranks import reserved_port
from pipeline.parallel.topology import SINGLE, Layout, ProcessGroups, TensorParallel

# On a CPU, whose cores may be shared, a process may not run for many seconds although it is well.
_DEAD_AFTER_S = {"cuda": 6.0, "cpu": 30.0}
_PATIENCE_S = {"cuda": 60.0, "cpu": 300.0}
# A killed process closes its connections; a stopped one keeps them, and only falls silent.
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def _two(setting: Setting, target: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Starts `target(rank, *arguments)` as two processes."""
    # A fork server starts processes quickly, but CUDA does not work in a fork of a process that has
    # asked for the device.
    context = get_context("spawn") if setting.on_gpu else get_context("forkserver")
    ranks: list[BaseProcess] = []
    for rank in range(2):
        process = context.Process(target=target, args=(rank, *arguments), daemon=True)
        process.start()
        ranks.append(process)
    return ranks


# --- Tensor parallelism ---------------------------------------------------------------------------


def check_two_ranks(setting: Setting) -> CheckRow:
    """Tensor parallelism over two processes, against one process: the loss and the norm of the
    gradient."""
    receivers: list[Connection] = []
    senders: list[Connection] = []
    for _ in range(2):
        receiver, sender = get_context().Pipe(duplex=False)
        receivers.append(receiver)
        senders.append(sender)
    with reserved_port() as port:
        ranks = _two(setting, _one_of_two, port, setting, senders)
        # Only the ranks may hold these ends: then `recv` fails where a rank ends without a result.
        for sender in senders:
            sender.close()
        results = [receiver.recv() for receiver in receivers]
        for process in ranks:
            process.join()

    expected_loss, expected_norm = _loss_and_norm(setting, SINGLE)
    errors: list[float] = []
    for loss, norm in results:
        errors.append(abs(loss / expected_loss - 1))
        errors.append(abs(norm / expected_norm - 1))
    error = largest_error(errors)
    return CheckRow(
        "two ranks on one device, through gloo: loss and gradient norm of tp 2",
        error < 1e-4,
        f"off by {error:.1e}",
    )


def _one_of_two(rank: int, port: int, setting: Setting, results: list[Connection]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results[rank].send(_loss_and_norm(setting, ProcessGroups(Layout(2, 2)).tensor_parallel))
    dist.destroy_process_group()


def _loss_and_norm(setting: Setting, tp: TensorParallel) -> tuple[float, float]:
    """The loss of a batch in fp32, and the norm of the gradient of all matrices."""
    model = started(FullFineTuning(name="fft"), setting, torch.float32, tp)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(512, (2, 32), generator=generator).to(setting.device)
    loss = model(tokens, tokens).total
    loss.backward()
    # In fp64: the sum's own rounding would be as large as what is compared.
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        # The gains of norms are whole on every rank: over both they would count twice.
        if parameter.grad is not None and parameter.dim() > 1:
            total += parameter.grad.double().square().sum().cpu()
    if tp.size > 1:
        dist.all_reduce(total)
    return float(loss.detach()), float(total.sqrt())


# --- The watchdog ---------------------------------------------------------------------------------


def check_watchdog(setting: Setting) -> Iterator[CheckRow]:
    """A rank that is killed, and one that is stopped: the other ends within seconds, with a line
    that names it.

    Two ranks of NCCL need two GPUs; on one they share it through gloo.
    """
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    with ExitStack() as ports:
        # Both cases run at once: each waits for most of its time.
        started: dict[str, tuple[Path, BaseProcess, BaseProcess]] = {}
        for what in _SIGNALS:
            port = ports.enter_context(reserved_port())
            started[what] = _start_watched(what, port, backend, setting)
        for what, (folder, first, second) in started.items():
            yield _watched_row(what, folder, first, second, backend, setting)


def _watched_row(
    what: str,
    folder: Path,
    first: BaseProcess,
    second: BaseProcess,
    backend: str,
    setting: Setting,
) -> CheckRow:
    """Whether rank 0 ends with the exit code of a lost rank, and a line that names rank 1."""
    patience_s = _PATIENCE_S[setting.device_type]
    disturbed = _appears(folder / "disturbed", first, patience_s)
    began = time.monotonic()
    first.join(patience_s)
    seconds = time.monotonic() - began
    for process in (first, second):
        process.kill()
        process.join()
    error = "no error line"
    for line in (folder / "0.log").read_text(encoding="utf-8").splitlines():
        # The level of a message, as pipeline/log.py writes it.
        if " E " in line:
            error = line
            break
    names_it = "rank 1" in error and "was lost" in error
    return CheckRow(
        f"{backend}, a rank is {what}: the other names it and ends",
        disturbed and names_it and first.exitcode == LOST_RANK,
        f"ended after {seconds:.1f} s with {first.exitcode}: {error}",
    )


def _start_watched(
    what: str, port: int, backend: str, setting: Setting
) -> tuple[Path, BaseProcess, BaseProcess]:
    """Starts the two ranks of a case; returns their folder and processes."""
    folder = setting.folder / "watchdog" / what
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    first, second = _two(
        setting, _watched, port, setting.device_type, backend, folder, _SIGNALS[what]
    )
    return folder, first, second


def _appears(path: Path, process: BaseProcess, patience_s: float) -> bool:
    """Whether a file appears before its process ends or the time is over."""
    deadline = time.monotonic() + patience_s
    while not path.exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


def _watched(
    rank: int, port: int, device_type: str, backend: str, folder: Path, number: signal.Signals
) -> None:
    """Steps under a watchdog; in the data phase of one of them rank 1 gets the signal."""
    # The log of each rank: also of what libraries write to stderr by its number.
    descriptor = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    log.configure()
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=2 * _PATIENCE_S[device_type]),
    )
    phases = Phases(device)
    limits = Limits(
        beat_every_s=0.5,
        dead_after_s=_DEAD_AFTER_S[device_type],
        hung_after_s=300,
        slow_after_s=300,
    )
    with RankWatchdog(limits, phases, folder / "stacks"):
        for step in range(1000):
            with phases("data"):
                if (rank, step) == (1, 20):
                    (folder / "disturbed").touch()
                    os.kill(os.getpid(), number)
                time.sleep(0.05)
            with phases("communication"):
                total = torch.ones(1, device=device)
                dist.all_reduce(total)
                # The host waits for the sum, as training does for the loss.
                total.item()
            phases.finished(step + 1)
