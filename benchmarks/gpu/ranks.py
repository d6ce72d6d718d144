"""Two processes: a tensor-parallel model against one in one process, and what the watchdog does
about a lost one."""

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

from benchmarks.gpu.setting import CheckRow, Setting, started
from pipeline import log
from pipeline.config.health import WatchdogSettings as Limits
from pipeline.config.method import FullFineTuning
from pipeline.errors import LOST_RANK
from pipeline.health.liveness import Phases
from pipeline.health.watchdog import RankWatchdog
from pipeline.local_ranks import reserved_port
from pipeline.parallel.topology import SINGLE, Layout, ProcessGroups, TensorParallel

_DEAD_AFTER_S = {"cuda": 6.0, "cpu": 30.0}  # the cores of a CPU may be shared
_PATIENCE_S = {"cuda": 60.0, "cpu": 300.0}
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def _two(setting: Setting, target: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Starts `target(rank, *arguments)` as two processes."""
    # A server that has imported all forks quickly, but on a GPU it must not have asked for the
    # device.
    context = get_context("spawn") if setting.on_gpu else get_context("forkserver")
    ranks: list[BaseProcess] = [
        context.Process(target=target, args=(rank, *arguments), daemon=True) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    return ranks


# --- Tensor parallelism ---------------------------------------------------------------------------


def check_two_ranks(setting: Setting) -> CheckRow:
    """Tensor parallelism over two processes, against one process: the loss and the norm of the
    gradient."""
    with reserved_port() as port:
        ends = [get_context().Pipe(duplex=False) for _ in range(2)]
        ranks = _two(setting, _one_of_two, port, setting, [sender for _, sender in ends])
        for _, sender in ends:
            sender.close()
        found = [receiver.recv() for receiver, _ in ends]
        for process in ranks:
            process.join()
    expected = _loss_and_norm(setting, SINGLE)
    error = max(
        abs(own / wanted - 1) for pair in found for own, wanted in zip(pair, expected, strict=True)
    )
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
    """Of a batch in fp32. The base's norms are whole on every rank: their gradients are left
    out."""
    model = started(FullFineTuning(name="fft"), setting, torch.float32, tp)
    tokens = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0)).to(
        setting.device
    )
    loss = model(tokens, tokens).total
    loss.backward()
    squares = [
        own.grad.double().square().sum()
        for own in model.parameters()
        if own.grad is not None and own.dim() > 1
    ]
    total = torch.stack(squares).sum().cpu()
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
        started = {
            what: _start_watched(what, ports.enter_context(reserved_port()), backend, setting)
            for what in _SIGNALS
        }
        for what, (folder, first, second) in started.items():
            disturbed = _appears(folder / "disturbed", first, _PATIENCE_S[setting.device_type])
            began = time.monotonic()
            first.join(_PATIENCE_S[setting.device_type])
            seconds = time.monotonic() - began
            for process in (first, second):
                process.kill()
                process.join()
            lines = (folder / "0.log").read_text(encoding="utf-8").splitlines()
            error = next((line for line in lines if " E " in line), "no error line")
            named = (
                disturbed
                and "rank 1" in error
                and "was lost" in error
                and first.exitcode == LOST_RANK
            )
            found = f"ended after {seconds:.1f} s with {first.exitcode}: {error}"
            yield CheckRow(
                f"{backend}, a rank is {what}: the other names it and ends", named, found
            )


def _start_watched(
    what: str, port: int, backend: str, setting: Setting
) -> tuple[Path, BaseProcess, BaseProcess]:
    folder = setting.folder / "watchdog" / what
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    first, second = _two(
        setting, _watched, port, setting.device_type, backend, folder, _SIGNALS[what]
    )
    return folder, first, second


def _appears(path: Path, process: BaseProcess, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not path.exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


def _watched(
    rank: int, port: int, device_type: str, backend: str, folder: Path, number: signal.Signals
) -> None:
    """Steps under a watchdog; in the data phase of one of them rank 1 gets the signal."""
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
                total.item()
            phases.finished(step + 1)
