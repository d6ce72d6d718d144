"""The table of the benchmark: a row for each variant, with ratios to the variants it is read by."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache

import torch

from benchmarks.gpu_step.contender import Contender
from benchmarks.gpu_step.models import our_model
from benchmarks.gpu_step.shapes import Shape
from benchmarks.results import Row
from pipeline.model.from_hf import read_spec
from pipeline.sizing.flops import count_flops

# Methods of others, by those of ours that do the same work.
COUNTED_AS = {"transformers_fft": "fft", "peft_lora": "lora", "peft_lora_16": "lora_16"}

# The name of a ratio, the figure, and the variant that it is relative to.
RATIOS = (
    ("ratio_to_fft", "seconds_per_step", "fft"),
    ("ratio_to_fft_min", "seconds_min", "fft"),
    ("ratio_to_fft_cpu", "cpu_seconds_per_step", "fft"),
    ("ratio_to_fft_flops", "flops_per_token", "fft"),
    ("ratio_to_adapt_min", "seconds_min", "adapt"),
    ("ratio_to_adapt_cpu", "cpu_seconds_per_step", "adapt"),
    ("ratio_to_peft_lora", "seconds_per_step", "peft_lora"),
)


@cache
def flops_per_token(method: str, shape: Shape) -> float:
    """The FLOPs per token of one of our methods.

    Frozen parts count for what is computed of them.
    """
    with torch.device("meta"):
        model = our_model(method, read_spec(shape.architecture), shape.l_fp)
        flops = count_flops(model, shape.sequence_length)
    # Causal attention needs half of the pairs of tokens that were counted, and of packed documents
    # those within each.
    return flops.matrix + shape.share_of_pairs * flops.attention / 2


def row_of(contender: Contender, shape_name: str) -> Row:
    """The figures of a contender; TFLOP/s are of the work that is really done."""
    method = contender.variant.method
    row: Row = {"shape": shape_name, "variant": str(contender.variant)}
    if contender.fault or not contender.steps:
        row["outcome"] = contender.fault or "no time left"
        return row

    row["outcome"] = "measured"
    seconds = [step.seconds for step in contender.steps]
    cpu_seconds = [step.cpu_seconds for step in contender.steps]
    median = statistics.median(seconds)
    rate = contender.shape.batch_size * contender.shape.sequence_length / median
    flops = flops_per_token(COUNTED_AS.get(method, method), contender.shape)
    row["tokens_per_second"] = rate
    row["tflops"] = flops * rate / 1e12
    if contender.peak_gib is not None:
        row["peak_memory_gib"] = contender.peak_gib
    row["seconds_per_step"] = median
    # Other processes only ever lengthen a step: the least time is the one that they changed least.
    row["seconds_min"] = min(seconds)
    row["seconds_max"] = max(seconds)
    if contender.device.type == "cpu":
        # Beside a GPU, processors launch kernels and wait: their time says nothing.
        row["cpu_seconds_per_step"] = min(cpu_seconds)
    row["flops_per_token"] = flops
    row["trained_parameters"] = contender.trained_parameters
    return row


def rows_of(contenders: Sequence[Contender], shape_name: str) -> list[Row]:
    """The rows of the contenders, with their ratios to full fine-tuning, Adapt and PEFT's LoRA."""
    rows: dict[str, Row] = {}
    for contender in contenders:
        rows[str(contender.variant)] = row_of(contender, shape_name)
    for name, figure, reference in RATIOS:
        of_reference = rows.get(reference, {}).get(figure)
        if of_reference is None:
            # The reference was not chosen, not measured yet, or has no such figure.
            continue
        for row in rows.values():
            if figure in row:
                row[name] = row[figure] / of_reference
    return list(rows.values())


def columns_of(device: torch.device) -> list[str]:
    """The columns of the table: all figures would not fit on a screen; the JSON file has them."""
    if device.type == "cpu":
        figures = ["tokens_per_second", "seconds_per_step", "seconds_min", "cpu_seconds_per_step"]
        ratios = ["ratio_to_fft", "ratio_to_fft_min", "ratio_to_fft_cpu", "ratio_to_fft_flops"]
        ratios += ["ratio_to_adapt_min", "ratio_to_adapt_cpu"]
    else:
        figures = ["tokens_per_second", "tflops", "peak_memory_gib", "seconds_per_step"]
        figures += ["seconds_min", "seconds_max"]
        ratios = ["ratio_to_fft", "ratio_to_fft_min"]
    return ["variant", *figures, *ratios, "ratio_to_peft_lora", "trained_parameters", "outcome"]
