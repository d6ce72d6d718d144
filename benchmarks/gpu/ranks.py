"""Two processes on one device, connected by gloo: a tensor-parallel model against one in one process."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.gpu.setting import Row, Setting, started
from pipeline.config.method import FullFineTuning
from pipeline.local_ranks import reserved_port
from pipeline.parallel.topology import SINGLE, Layout, ProcessGroups, TensorParallel


def check_two_ranks(setting: Setting) -> Row:
    """Tensor parallelism over two processes, against one process: the loss and the norm of the gradient."""
    context = get_context("spawn")
    with reserved_port() as port:
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [
            context.Process(target=_one_of_two, args=(rank, port, setting, ends[rank][1]), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for _, sender in ends:
            sender.close()
        found = [receiver.recv() for receiver, _ in ends]
        for process in ranks:
            process.join()
    expected = _loss_and_norm(setting, SINGLE)
    error = max(abs(own / wanted - 1) for pair in found for own, wanted in zip(pair, expected, strict=True))
    return Row(
        "two ranks on one device, through gloo: loss and gradient norm of tp 2", error < 1e-4, f"off by {error:.1e}"
    )


def _one_of_two(rank: int, port: int, setting: Setting, results: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results.send(_loss_and_norm(setting, ProcessGroups(Layout(2, 2)).tensor_parallel))
    dist.destroy_process_group()


def _loss_and_norm(setting: Setting, tp: TensorParallel) -> tuple[float, float]:
    """Of a batch in fp32. The base's norms are whole on every rank: their gradients are left out."""
    model = started(FullFineTuning(name="fft"), setting, torch.float32, tp)
    tokens = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0)).to(setting.device)
    loss = model(tokens, tokens).total
    loss.backward()
    squares = [own.grad.double().square().sum() for own in model.parameters() if own.grad is not None and own.dim() > 1]
    total = torch.stack(squares).sum().cpu()
    if tp.size > 1:
        dist.all_reduce(total)
    return float(loss.detach()), float(total.sqrt())
