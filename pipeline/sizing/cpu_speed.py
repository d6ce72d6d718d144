"""The speed of this machine's processor in training, measured on a part of the base.

The part has the base's widths, random weights, one or two layers, and a small vocabulary. A forward
and backward pass of it takes a fraction of a second, and reaches within a tenth the FLOP/s of a
whole step. Processor time is measured, so that other work on the machine does not count.
"""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import torch

from pipeline.methods.baselines import FullFineTuningMethod
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.cluster import Cluster, Speed
from pipeline.sizing.flops import count_flops

_LAYERS = 2
_TOKENS = 512
_FEWEST_TOKENS = 64
_VOCABULARY = 4096
_MOST_FLOPS = 8e10
"""FLOPs of a pass for each thread: below a second on most processors."""
_PASSES = 3
"""The first one is for warming up."""
_16_BIT_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Of x86, and of ARM, as /proc/cpuinfo names them."""


def multiplies_bf16() -> bool:
    """Whether this machine's processor has instructions for products of bf16 matrices."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # Not Linux.
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _16_BIT_FLAGS.isdisjoint(value.split())
    return False


def cpu_speed(spec: DecoderSpec, dtype: torch.dtype, cluster: Cluster) -> Speed:
    """The speed of one of the CPU processes of `cluster`, with weights of `dtype`.

    It is what `cluster` gives, or else it is measured on this machine.
    """
    if cluster.peak_tflops is not None:
        return Speed(cluster.peak_tflops, cluster.mfu or 1.0, "as given")
    threads = threads_of_rank(cluster)
    flops_per_second = measured_flops_per_second(spec, dtype, threads)
    name = str(dtype).removeprefix("torch.")
    source = f"measured here on a part of the base, {name}, {threads} thread(s) a process"
    return Speed(flops_per_second / 1e12, 1.0, source)


def threads_of_rank(cluster: Cluster) -> int:
    """The threads of a process, as slurm/ranks.sh sets them."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // min(cluster.gpus, cluster.gpus_per_node))


@cache
def measured_flops_per_second(spec: DecoderSpec, dtype: torch.dtype, threads: int) -> float:
    """The FLOP/s of training that `threads` threads reach together on a part of the base."""
    part, tokens, flops = _part(spec, threads)
    with default_dtype(dtype):
        model = _built(part)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02)
    ids = torch.arange(tokens).remainder(part.vocab_size).view(1, tokens)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fastest = min([_seconds_of_pass(model, ids) for _ in range(_PASSES)][1:])
    finally:
        torch.set_num_threads(before)
    # The processor time of all threads is added up.
    return flops * tokens * threads / fastest


def _seconds_of_pass(model: CausalDecoder, ids: torch.Tensor) -> float:
    """The processor time of a forward and backward pass over ids [1, S]."""
    begin = time.process_time()
    losses = model(ids, ids, None, None, 0, 0)
    losses.total.backward()
    return time.process_time() - begin


def _part(spec: DecoderSpec, threads: int) -> tuple[DecoderSpec, int, float]:
    """A part of the base whose pass is short; the tokens of the pass, and the FLOPs of each."""
    plain: dict[str, object] = {}
    for setting in fields(DecoderSpec):  # A spec of another kind has more.
        plain[setting.name] = getattr(spec, setting.name)
    whole = DecoderSpec(**plain)  # type: ignore[arg-type]
    layer = replace(whole.layers[0], has_experts=False)
    widths = whole.widths
    if widths.intermediate_size == 0:
        widths = replace(widths, intermediate_size=4 * widths.hidden_size)
    part = replace(
        whole,
        layers=(layer,) * _LAYERS,
        widths=widths,
        mixture=None,  # All experts of one layer may be larger than the memory.
        residual=None,
        vocab_size=min(_VOCABULARY, whole.vocab_size),
        new_tokens=0,
        added_tokens=0,
    )
    tokens = min(_TOKENS, whole.max_position_embeddings)
    flops = _flops_per_token(part, tokens)
    if flops * tokens > _MOST_FLOPS * threads:
        part = replace(part, layers=(layer,))
        flops = _flops_per_token(part, tokens)
    while flops * tokens > _MOST_FLOPS * threads and tokens > _FEWEST_TOKENS:
        tokens //= 2
    return part, tokens, flops


def _flops_per_token(part: DecoderSpec, tokens: int) -> float:
    with torch.device("meta"):
        model = _built(part)
    return count_flops(model, tokens).total


def _built(part: DecoderSpec) -> CausalDecoder:
    """Full fine-tuning of the part: other methods reach about the same FLOP/s."""
    return FullFineTuningMethod().build(part, SINGLE, "none")
