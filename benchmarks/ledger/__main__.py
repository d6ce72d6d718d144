"""What a training step reads, writes and computes, and how long a GPU needs for that: without one.

    python -m benchmarks.ledger --model 1b --method adapt --compile
    python -m benchmarks.ledger --measured docs/results/gpu/h100.json    beside what an H100 measured
    python -m benchmarks.ledger --loss operations fused                  before and after a change

The step is that of `benchmarks.gpu_step`: forward pass, loss, backward pass and fused AdamW with
fp32 masters, whole rows (of `1b-packed` packed documents) in bf16, without activation
checkpointing, on one GPU. It runs on torch's meta device, where tensors have shapes and no values.
Every operation adds the bytes that it reads and writes, its FLOPs, and a kernel. Its time is the
longest of three: its bytes at --terabytes a second, its FLOPs at --tflops, and --microseconds for
its start. An operation of the backward pass counts for the module of its forward pass.

With --compile, everything in a layer between two products counts as one kernel, which reads what it
takes once and writes what is read later. The compiled loss counts as two such kernels a chunk.

Attention's rates are those that the H100 reached, so that its rows say nothing about them. Left out
are waits of the host, allocation, and what a cache saves between kernels. Gigabytes are 10^9 bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_step.shapes import SHAPES, TINY, Shape
from benchmarks.gpu_step.variants import OURS, THEIRS, Variant
from benchmarks.ledger.prices import Prices, summed, sums
from benchmarks.ledger.recorded_step import recorded
from benchmarks.ledger.tape import Operation
from benchmarks.results import BASES, Row, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.errors import ConfigError
from pipeline.files.json_files import read_object
from pipeline.model.output import GPU_CHUNK_ELEMENTS

MODELS = {
    "1b": SHAPES["1b-8192"],
    "1b-packed": SHAPES["1b-8192-packed"],
    "8b": SHAPES["8b-4096"],
    "30b-a3b": Shape(BASES / "qwen3-30b-a3b.json", 1, 4096, 10),
    "tiny": TINY,
}
LOSSES = ("fused", "operations")
MEBI = 2**20


def main() -> None:
    options = parse_options()
    prices = Prices(
        terabytes=options.terabytes,
        product_tflops=options.tflops,
        kernel_microseconds=options.microseconds,
    )
    if options.measured is not None:
        rows = rows_beside_measured(options.measured, prices)
        print_rows(rows)
    else:
        rows = rows_of_steps(options, prices)
    write_rows(options, rows)


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser(__doc__, "python -m benchmarks.ledger")
    parser.add_argument("--model", choices=MODELS, default="1b", help="default: 1b")
    parser.add_argument("--method", choices=(*OURS, *THEIRS), default="adapt")
    parser.add_argument("--compile", action="store_true", help="with compiled layers")
    parser.add_argument(
        "--loss", nargs="+", choices=LOSSES, default=["fused"], help="of ours; default: fused"
    )
    parser.add_argument("--by", choices=("module", "operation"), default="module")
    parser.add_argument(
        "--chunk",
        type=command_line.positive,
        default=GPU_CHUNK_ELEMENTS // MEBI,
        help="how many Mi logits exist at a time; default: 128",
    )
    parser.add_argument("--terabytes", type=float, default=Prices.terabytes, help="default: 2.9")
    parser.add_argument("--tflops", type=float, default=Prices.product_tflops, help="default: 700")
    parser.add_argument(
        "--microseconds", type=float, default=Prices.kernel_microseconds, help="default: 6"
    )
    parser.add_argument(
        "--measured", type=Path, metavar="JSON", help="compare with all steps of this file"
    )
    return parser.parse_args()


def rows_of_steps(options: argparse.Namespace, prices: Prices) -> list[Row]:
    """Prints a table of each step of the options; returns the rows of all."""
    shape = MODELS[options.model]
    variant = Variant(options.method, compiled=options.compile)
    tokens = shape.batch_size * shape.sequence_length
    found: list[Row] = []
    for loss in options.loss:
        operations = recorded(
            variant, shape, chunk_elements=options.chunk * MEBI, fused_loss=loss == "fused"
        )
        rows = rows_by(options.by, operations, prices)
        total = summed(rows, "the step")
        print(f"{options.model}, {variant}, {shape.batch_size} x {shape.sequence_length} tokens, ")
        print(f"loss: {loss}: {1000 * tokens / total['ms']:,.0f} tokens/s")
        print_rows([*rows, total])
        for row in [*rows, total]:
            found.append({"loss": loss, **row})
    return found


def rows_by(what: str, operations: Sequence[Operation], prices: Prices) -> list[Row]:
    """A row for each module or operation."""

    def module(operation: Operation) -> str:
        direction = "backward" if operation.backward else "forward"
        return f"{folded(operation.module)} {direction}"

    def name(operation: Operation) -> str:
        return operation.name

    return sums(operations, prices, module if what == "module" else name)


def folded(path: str) -> str:
    """A module's path, the same for all layers and without the parts of a widened map."""
    parts: list[str] = []
    for part in path.split("."):
        parts.append("*" if part.isdigit() else part)
    return ".".join(parts[:4])


def rows_beside_measured(file: Path, prices: Prices) -> list[Row]:
    """A row for each measured step of a 1B, with its time as counted.

    Raises:
        ConfigError: the file has no steps.
    """
    measured = read_object(file, ConfigError, "give a file like docs/results/gpu/h100.json")
    if "steps" not in measured:
        raise ConfigError(f"{file}: expected `steps`, as in docs/results/gpu/h100.json")
    rows: list[Row] = []
    for step in measured["steps"]:
        method = step["variant"].removesuffix(" + compile")
        mebi = int(step["chunk_of_logits"].removesuffix("M"))
        operations = recorded(
            Variant(method, compiled=step["compiled"]),
            MODELS["1b"],
            chunk_elements=mebi * MEBI,
            # What ran then.
            fused_loss=False,
        )
        counted = summed(rows_by("operation", operations, prices), "the step")["ms"]
        rows.append(
            {
                "variant": step["variant"],
                "chunk": step["chunk_of_logits"],
                "counted_ms": counted,
                "measured_ms": 1000 * step["seconds_per_step"],
                "ratio": counted / 1000 / step["seconds_per_step"],
            }
        )
    return rows


if __name__ == "__main__":
    command_line.run(main)
