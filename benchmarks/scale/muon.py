"""A step of Muon on many ranks: what a rank sends, and what the busiest one computes.

The matrices are those of full fine-tuning. ZeRO-2 cuts them, laid in a row, into equal parts, and
the project's own `DividedMatrices` plans which rank computes which. Rank 0 then makes its exchanges
on fake tensors and torch's fake process group, and what it sends must be what the plan says. What
the other ranks send and compute follows from the plan.

Beside it stands what a step would take if each rank had all gradients in fp32 and orthogonalised
all matrices itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.ledger.prices import Prices
from benchmarks.messages import Messages
from benchmarks.results import BASES, Row, adapt_run
from benchmarks.scale.growth import in_own_process, report
from pipeline.config.run import parse_config
from pipeline.methods.registry import training_method
from pipeline.model.decoder import is_layer_matrix
from pipeline.model.from_hf import read_spec
from pipeline.optimizers import divided_matrices
from pipeline.optimizers.divided_matrices import Bucket, DividedMatrices
from pipeline.optimizers.muon import ITERATIONS
from pipeline.parallel.parameters import OptimizerShard
from pipeline.parallel.topology import SINGLE, Layout

MODELS = {
    "llama-3.1-8b": {},
    # The widths of Qwen3-32B.
    "a 32B": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
SMALLEST = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MESSAGE_BYTES = 2
"""Of an element: Muon sends bf16 on GPUs."""
GRADIENT_BYTES = 4
GOALS = {
    # One to the owners of the matrices, and one back.
    "messages": 2,
    "over_best": 1.1,
    "busiest_ms": 50,
}
"""At the most ranks."""


def flops(shape: Sequence[int]) -> int:
    """FLOPs of orthogonalising a matrix [out, in]: three products in each iteration."""
    short, long = sorted(shape)
    # x xᵀ, its square, and their sum times x.
    return ITERATIONS * (2 * short * short * long + 2 * short**3 + 2 * short * short * long)


def shapes_of(scratch: Path, widths: dict[str, int]) -> list[torch.Size]:
    """The matrices that Muon updates in full fine-tuning, in the order of the optimizer."""
    described = json.loads((BASES / "llama-3.1-8b.json").read_text())
    base = scratch / "config.json"
    base.write_text(json.dumps({**described, **widths}))
    values = adapt_run(scratch, base, zero=2, sequences=1).model_dump(mode="json")
    config = parse_config({**values, "method": {"name": "fft"}}, source="the benchmark")
    with torch.device("meta"):
        model = training_method(config).build(read_spec(base), SINGLE, "none")
    shapes: list[torch.Size] = []
    for name, parameter in model.named_parameters():
        if is_layer_matrix(name, parameter):
            shapes.append(parameter.shape)
    return shapes


def held_by_all(shapes: Sequence[torch.Size], ranks: int) -> Tensor:
    """Which elements of each matrix each rank holds: int64 [matrices, ranks, 2], the first and how
    many."""
    sizes = torch.tensor([prod(shape) for shape in shapes])
    begins = sizes.cumsum(0) - sizes
    part = -(-int(sizes.sum()) // ranks)
    cuts = torch.arange(ranks + 1) * part
    first = (cuts[:-1] - begins[:, None]).clamp(min=0).minimum(sizes[:, None])
    stop = (cuts[1:] - begins[:, None]).clamp(min=0).minimum(sizes[:, None])
    return torch.stack([first, stop - first], dim=-1)


def divided(shapes: Sequence[torch.Size], ranks: int) -> tuple[DividedMatrices, int]:
    """The plan of `ranks`, as rank 0 has it, and how many elements rank 0 holds."""
    held = held_by_all(shapes, ranks)
    flat = torch.empty(0)
    shards: list[OptimizerShard] = []
    start = 0
    for shape, (first, length) in zip(shapes, held[:, 0].tolist(), strict=True):
        parameter = nn.Parameter(torch.empty(shape, device="meta"))
        shards.append(OptimizerShard(parameter, flat, start, first, length))
        start += length
    # A fake process group gathers nothing.
    with patch.object(divided_matrices, "_held_by_all", lambda *_: held.tolist()):
        return DividedMatrices(shards, Layout(ranks)), start


def messages_of_rank_0(matrices: DividedMatrices, elements: int) -> list[int]:
    """The bytes of each collective of a step."""
    with FakeTensorMode(), Messages() as messages:
        values = torch.empty(elements, dtype=torch.bfloat16)
        for _ in matrices.map(lambda whole: whole, values, torch.bfloat16):
            pass
    return [length for name, length, _ in messages.sent if name.startswith("alltoall")]


def exchanged(bucket: Bucket, layout: Layout) -> Tensor:
    """The elements that each rank passes to each of a bucket's two collectives: int64 [2, ranks],
    what it sends or receives, whichever is more."""
    sent = torch.zeros(2, layout.world_size, dtype=torch.int64)
    received = torch.zeros_like(sent)
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        for piece in matrix.sources(layout):
            sent[0, piece.rank] += piece.length
            received[0, owner] += piece.length
        for piece in matrix.pieces:
            sent[1, owner] += piece.length
            received[1, piece.rank] += piece.length
    return sent.maximum(received)


def compare(scratch: Path, widths: dict[str, int], ranks: int) -> Row:
    """A step on `ranks`, beside one in which each rank computes all."""
    shapes = shapes_of(scratch, widths)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    matrices, elements = divided(shapes, ranks)
    layout = Layout(ranks)
    buckets = matrices._buckets
    payloads = torch.zeros(ranks, dtype=torch.int64)
    of_rank_0: list[int] = []
    busiest = 0
    for bucket in buckets:
        in_bucket = exchanged(bucket, layout)
        payloads += in_bucket.sum(0)
        of_rank_0 += (MESSAGE_BYTES * in_bucket[:, 0]).tolist()
        loads = [0] * ranks
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            loads[owner] += flops(matrix.shape)
        # No rank begins a bucket before all have ended the one before.
        busiest += max(loads)
    assert messages_of_rank_0(matrices, elements) == of_rank_0, "the plan is what is sent"
    each = [flops(shape) for shape in shapes]
    total = sum(each)
    tflops = Prices.product_tflops
    size = sum(prod(shape) for shape in shapes)
    return {
        "matrices": len(shapes),
        "messages": len(of_rank_0),
        "mean_mib": round(MESSAGE_BYTES * payloads.double().mean().item() / 2**20, 1),
        "most_mib": round(MESSAGE_BYTES * int(payloads.max()) / 2**20, 1),
        "busiest_tflop": round(busiest / 1e12, 3),
        # No plan is better than equal loads, nor than the largest matrix alone.
        "over_best": round(busiest / max(total / ranks, *each), 3),
        "total_over_busiest": round(total / busiest, 1),
        "busiest_ms": round(busiest / tflops / 1e9, 2),
        "each_rank_all_gb": round(GRADIENT_BYTES * size / 1e9, 1),
        "each_rank_all_ms": round(total / tflops / 1e9, 2),
    }


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of ranks for each model."""
    models: dict[str, dict[str, int]] = MODELS
    counts: tuple[int, ...] = (8, 64, 256, 1024)
    if smallest:
        models = {"tiny": SMALLEST}
        counts = (2, 4, 32)
    for name, widths in models.items():
        title = f"Muon: full fine-tuning of {name} under ZeRO-2"
        row = partial(in_own_process, compare, scratch, widths)
        yield report(title, "ranks", counts, row, GOALS)
