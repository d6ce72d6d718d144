"""The time of a training step on the CPU beside transformers' Trainer and PEFT, on equal work.

    python -m benchmarks.trainer_step --json benchmarks/out/trainer_step.json

Both sides are whole trainers: ours is the engine of `scale-cpt train` under DeepSpeed (ZeRO-1, one
process) with the totals of a step; theirs is `Trainer.train`. They read the same weights and
tokens, in the same type, with fused AdamW, clipping, and recomputed layers or not. Left out are
data loading, logging and checkpoints. Equal losses after equal steps (`loss_ours`, `loss_theirs`)
show that the work is equal. Bases are random weights of a shipped config.json, or --base.

A row is a method: full fine-tuning; LoRA, beside PEFT's of the same rank and maps; and Preserve,
which transformers does not have: beside it stands transformers' full fine-tuning, and
`ratio_by_flops` is the ratio of times over the ratio of FLOPs. Elsewhere the FLOPs are equal.

The two sides are processes that take turns, so that load on the machine affects both alike. A
ratio is ours over theirs of one round, `ratio` the median of the rounds. `ratio_cpu` is that of
processor time. Below 1, ours is faster.

bf16 is measured where the processor multiplies it (avx512_bf16, AMX), or with --dtype bf16: there
theirs is the Trainer's `bf16=True`, autocast over fp32 weights, and ours 16-bit weights with fp32
masters.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import torch

from benchmarks.results import BASES, STORIES, Row, make_parser, print_rows, write_rows
from benchmarks.trainer_step.contestant import contestant
from benchmarks.trainer_step.ours import flops_per_token
from benchmarks.trainer_step.work import SEED, Dtype, Method, Step, Work
from pipeline import command_line
from pipeline.sizing.cpu_speed import multiplies_bf16

MODELS = {"smollm2-135m": (2, 256), "llama-1m": (4, 256)}
"""Of configs/bases: rows and tokens of a step."""
TINY = (2, 16)
OPPONENTS: dict[Method, str] = {
    "fft": "transformers",
    "lora": "PEFT",
    "preserve": "transformers, fft",
}
LEAST_SECONDS = 1.0
"""A turn has so many steps that it takes this time: shorter ones are noise."""
MOST_STEPS = 50
NOT_MEASURED = "not measured: no instructions for bf16 (--dtype bf16)"
COLUMNS = (
    "model",
    "dtype",
    "recomputed",
    "method",
    "opponent",
    "us_per_token_ours",
    "us_per_token_theirs",
    "ratio",
    "ratio_cpu",
    "ratio_flops",
    "ratio_by_flops",
    "ratio_cpu_by_flops",
    "outcome",
)


def main() -> None:
    options = parse_options()
    rows: list[Row] = []
    for name in options.model:
        with base_of(name, options) as (base, shape):
            for row in rows_of_model(name, base, shape, options):
                rows.append(row)
                # After every row: a run that is ended early keeps what it has measured.
                write_rows(options, rows, torch=torch.__version__)
    print_rows(rows, COLUMNS)


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser(__doc__, "python -m benchmarks.trainer_step")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--base", type=Path, help="a folder whose weights take the place of random")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny base and batch: tries every row"
    )
    parser.add_argument(
        "--method", nargs="+", choices=get_args(Method), default=list(get_args(Method))
    )
    parser.add_argument("--dtype", nargs="+", choices=get_args(Dtype), help="default: see above")
    parser.add_argument("--recomputed", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument(
        "--rounds", type=command_line.positive, default=5, help="turns of each side; default 5"
    )
    parser.add_argument("--rank", type=command_line.positive, default=16, help="LoRA's; default 16")
    parser.add_argument(
        "--threads", type=command_line.positive, default=1, help="of a process; default 1"
    )
    options = parser.parse_args()
    if options.tiny:
        options.model = ["llama-1m"]
    return options


@contextmanager
def base_of(name: str, options: argparse.Namespace) -> Iterator[tuple[Path, tuple[int, int]]]:
    """A folder with weights, and the rows and tokens of a step."""
    if options.tiny or options.base:
        yield options.base or STORIES, TINY if options.tiny else MODELS[name]
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(BASES / f"{name}.json", local_files_only=True)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        yield Path(folder), MODELS[name]


def rows_of_model(
    name: str, base: Path, shape: tuple[int, int], options: argparse.Namespace
) -> Iterator[Row]:
    """The rows of a model, in the order of the table."""
    for dtype in get_args(Dtype):
        if options.dtype and dtype not in options.dtype:
            continue
        if dtype == "bf16" and not options.dtype and not multiplies_bf16():
            yield {"model": name, "dtype": dtype, "outcome": NOT_MEASURED}
            continue
        for recomputed in options.recomputed:
            for method in options.method:
                work = Work(
                    base,
                    method,
                    dtype,
                    recomputed == "yes",
                    options.rank,
                    *shape,
                    options.threads,
                )
                yield {"model": name, **measured(work, options.rounds)}


def measured(work: Work, rounds: int) -> Row:
    """The row of a method."""
    of_theirs = work
    if work.method == "preserve":
        of_theirs = Work(**{**vars(work), "method": "fft"})
    with contestant("ours", work) as ours, contestant("theirs", of_theirs) as theirs:
        # The first step allocates; the second says how many fit a turn.
        warm = (ours.turn(2), theirs.turn(2))
        longest = max(warm[0][-1].seconds, warm[1][-1].seconds)
        steps = max(1, min(MOST_STEPS, round(LEAST_SECONDS / longest)))
        turns = [(ours.turn(steps), theirs.turn(steps)) for _ in range(rounds)]
    row: Row = {"dtype": work.dtype, "recomputed": "yes" if work.recomputed else "no"}
    row["method"] = work.method
    row["opponent"] = OPPONENTS[work.method]
    row |= ratios(turns, work.tokens_per_step)
    row["ratio_flops"] = flops_per_token(work) / flops_per_token(of_theirs)
    row["ratio_by_flops"] = row["ratio"] / row["ratio_flops"]
    row["ratio_cpu_by_flops"] = row["ratio_cpu"] / row["ratio_flops"]
    row["steps_per_turn"] = steps
    # The losses of each step, the warm ones included: equal work gives equal ones.
    for number, side in enumerate(("ours", "theirs")):
        row[f"loss_{side}"] = [step.loss for turn in (warm, *turns) for step in turn[number]]
    row["outcome"] = "measured"
    return row


def ratios(turns: Sequence[tuple[list[Step], list[Step]]], tokens: int) -> Row:
    """Times a token, and ours over theirs round by round, of which the median counts."""
    by_clock: list[float] = []
    by_cpu: list[float] = []
    for ours, theirs in turns:
        by_clock.append(_mean(ours, "seconds") / _mean(theirs, "seconds"))
        by_cpu.append(_mean(ours, "cpu_seconds") / _mean(theirs, "cpu_seconds"))
    row: Row = {"tokens_per_step": tokens}
    for number, side in enumerate(("ours", "theirs")):
        for figure, label in (("seconds", "us"), ("cpu_seconds", "cpu_us")):
            median = statistics.median(_mean(turn[number], figure) for turn in turns)
            row[f"{label}_per_token_{side}"] = 1e6 * median / tokens
    row["ratio"] = statistics.median(by_clock)
    row["ratio_min"] = min(by_clock)
    row["ratio_max"] = max(by_clock)
    row["ratio_cpu"] = statistics.median(by_cpu)
    return row


def _mean(steps: Sequence[Step], figure: str) -> float:
    return statistics.mean(getattr(step, figure) for step in steps)


if __name__ == "__main__":
    command_line.run(main)
