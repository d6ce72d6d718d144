"""The time and memory of a training step: this project's methods beside transformers and PEFT.

    python -m benchmarks.gpu_step --json benchmarks/out/gpu_step.json    on one GPU, in bf16
    python -m benchmarks.gpu_step --cpu                                  on the CPU, in fp32

A step is the forward pass, the loss, the backward pass and fused AdamW, on random weights and
tokens; 16-bit weights have fp32 masters, as under DeepSpeed. Left out are data loading, gradient
accumulation and clipping, communication, and activation checkpointing.

The table has a row for each variant, and says how its step compares with full fine-tuning:
`ratio_to_fft` is its time over that of `fft`, so 0.5 is half the time. `preserve`, `adapt` and
`route` add an eighth to the hidden size, the FFN and the heads, as in the paper; the rank of `lora`
is an eighth of the hidden size. `adapt_own` has rows for a quarter of the vocabulary's tokens and
gains beside Adapt's width, `adapt_low_rank` differences of rank 16 on every linear map.
`transformers_fft` and `peft_lora` compute what `fft` and `lora` do; `peft_lora_16` has rank 16.

The shapes named `packed` have rows of documents of 500 to 1,000 tokens, as corpora have, in place of
rows of one document. There attention takes less of a step, and TFLOP/s count what it needs.

With --fa4 attention of all variants is by FlashAttention 4 (pip install 'scale-cpt[flash]').

The variants take turns, so that load on the machine affects all of them alike. Beside load, compare
the least time of a step (`seconds_min`, `ratio_to_fft_min`) or, with --cpu, its processor time over
all threads (`cpu_seconds_per_step`, `ratio_to_fft_cpu`), and not the median (`seconds_per_step`).
Processor time counts threads that wait for others: on a shared machine take --threads 1.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu_step.contender import Contender
from benchmarks.gpu_step.shapes import ON_A_CPU, ON_A_GPU, SHAPES, TINY, TINY_PACKED
from benchmarks.gpu_step.table import columns_of, rows_of
from benchmarks.gpu_step.variants import Variant, all_variants
from benchmarks.results import Row, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.errors import ConfigError
from pipeline.model.flash_attention import activate_flash_attention


def main() -> None:
    options = parse_options()
    if not options.cpu and not torch.cuda.is_available():
        raise ConfigError("no GPU: torch finds no CUDA device; --cpu measures on the CPU")
    variants = wanted_variants(options)
    if options.fa4:
        activate_flash_attention()
    torch.set_num_threads(thread_count(options))
    # Warnings of transformers about settings of its own would stand between the rows.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.manual_seed(0)
    # Every turn collects garbage; what was imported until here need not be searched each time.
    gc.freeze()
    measure(options, variants)


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser(__doc__, "python -m benchmarks.gpu_step")
    parser.add_argument(
        "--cpu", action="store_true", help="measure on the CPU, in fp32, without compiled layers"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny shapes in place of the large ones: tries every row",
    )
    parser.add_argument("--fa4", action="store_true", help="attention by FlashAttention 4")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="default: all of the device")
    parser.add_argument(
        "--variant", nargs="+", metavar="NAME", help='as the table names them: "adapt + compile"'
    )
    parser.add_argument(
        "--rounds", type=command_line.positive, default=3, help="turns of each variant; default 3"
    )
    parser.add_argument(
        "--steps", type=command_line.positive, default=3, help="measured steps a turn; default 3"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="a shape's time; then no turn begins"
    )
    parser.add_argument(
        "--threads", type=command_line.positive, help="default: all cores; 1 with --tiny"
    )
    return parser.parse_args()


def wanted_variants(options: argparse.Namespace) -> list[Variant]:
    """The variants of --variant, or all.

    Raises:
        ConfigError: a name is that of no variant.
    """
    # On a CPU compiled variants are slow to try and say nothing: only where they are asked for.
    compiled = options.tiny or not options.cpu or bool(options.variant)
    variants: dict[str, Variant] = {}
    for variant in all_variants(compiled=compiled):
        variants[str(variant)] = variant
    if not options.variant:
        return list(variants.values())

    unknown = sorted(set(options.variant) - variants.keys())
    if unknown:
        raise ConfigError(
            f"--variant: expected some of {', '.join(variants)}; found {', '.join(unknown)}"
        )
    # In the order of the table, whatever the order of the names.
    return [variant for name, variant in variants.items() if name in options.variant]


def thread_count(options: argparse.Namespace) -> int:
    """The threads of torch: those of --threads, or one for each core that this process may use."""
    if options.threads is not None:
        return int(options.threads)
    # Matrices of the tiny shapes are too small to divide: threads would only wait for each other.
    return 1 if options.tiny else len(os.sched_getaffinity(0))


def measure(options: argparse.Namespace, variants: Sequence[Variant]) -> None:
    """Measures the variants on each shape, prints a table of each, and writes all rows."""
    if options.cpu:
        device = torch.device("cpu")
        dtype = torch.float32
        device_name = "cpu"
        shape_names = options.shape or ON_A_CPU
    else:
        device = torch.device("cuda")
        dtype = torch.bfloat16
        device_name = torch.cuda.get_device_name()
        shape_names = options.shape or ON_A_GPU
    if options.tiny and not options.shape:
        # To try on any machine what a GPU would measure.
        shape_names = ON_A_GPU

    rows: list[Row] = []
    for shape_name in shape_names:
        # Otherwise the same code for another size would count as compiled too often, and run as it
        # is written.
        torch._dynamo.reset()
        shape = SHAPES[shape_name]
        if options.tiny:
            shape = TINY if shape.documents is None else TINY_PACKED
        contenders = [Contender(variant, shape, device, dtype) for variant in variants]
        for contender in turns(contenders, options.rounds, options.seconds):
            contender.turn(options.steps)
            # After every turn: whoever started this process may end it at a limit of time.
            found = [*rows, *rows_of(contenders, shape_name)]
            write_rows(options, found, device=device_name, torch=torch.__version__)

        of_shape = rows_of(contenders, shape_name)
        rows += of_shape
        write_rows(options, rows, device=device_name, torch=torch.__version__)
        print(f"{shape_name}:")
        print_rows(of_shape, columns_of(device))


def turns(contenders: Sequence[Contender], rounds: int, seconds: float) -> Iterator[Contender]:
    """Each contender `rounds` times, one after another, until `seconds` are over."""
    deadline = time.monotonic() + seconds
    for _ in range(rounds):
        for contender in contenders:
            if time.monotonic() >= deadline:
                return
            if not contender.fault:
                yield contender


if __name__ == "__main__":
    command_line.run(main)
