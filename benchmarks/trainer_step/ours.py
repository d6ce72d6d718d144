"""This project's side: the training engine, with the totals that the trainer makes of each step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.results import ROOT, Stopwatch, eighth_of
from benchmarks.trainer_step.work import (
    BETAS,
    CLIPPING,
    LEARNING_RATE,
    SEED,
    UNPREDICTED,
    Step,
    Work,
)
from pipeline.config.run import RunConfig, parse_config
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.methods.build_model import build_model
from pipeline.methods.registry import method_for
from pipeline.model.bases import load_base, open_base
from pipeline.model.from_hf import is_base, read_spec
from pipeline.parallel.topology import SINGLE, Layout, ProcessGroups
from pipeline.sizing.flops import count_flops
from pipeline.training import launch

DEEPSPEED_FILES = {"fp32": "zero1_fp32.json", "bf16": "zero1.json"}


def run_of(work: Work) -> RunConfig:
    """The run whose steps are timed; its data are never read."""
    method: dict[str, Any] = {"name": work.method}
    if work.method == "lora":
        method["rank"] = work.rank
    if work.method == "preserve":
        expansion = eighth_of(read_spec(work.base))
        method = {"name": "scale", "variant": "preserve", "expansion": expansion}
    values = {
        "name": "benchmark",
        "folder": str(work.base / "run"),
        "base": str(work.base),
        "method": method,
        "data": {
            "folder": str(work.base / "run"),
            "sequence_length": work.sequence_length,
            # As with transformers: a row is one document, and attention takes no mask.
            "document_mask": False,
            "corpora": {"text": {"input": [str(work.base / "text")], "heldout_fraction": 0.1}},
        },
        "schedule": {
            "steps": 1,
            "global_batch_size": work.batch_size,
            "micro_batch_size": work.batch_size,
            "learning_rate": LEARNING_RATE,
            "betas": BETAS,
            "gradient_clipping": CLIPPING,
        },
        "activation_checkpointing": "all" if work.recomputed else "none",
        "deepspeed": str(ROOT / "ds_configs" / DEEPSPEED_FILES[work.dtype]),
    }
    return parse_config(values, source="the benchmark")


def flops_per_token(work: Work) -> float:
    """Of our step, counted on its graph, what is recomputed included."""
    with torch.device("meta"):
        model = build_model(run_of(work), read_spec(work.base), SINGLE)
        flops = count_flops(model, work.sequence_length)
    # Causal attention needs half of the pairs of tokens that were counted.
    return flops.matrix + flops.attention / 2


def stepper(work: Work) -> Callable[[], Step]:
    """Makes a step at each call. It joins a group of one rank: once a process."""
    device = launch.initialise(launch.read_launch(os.environ))
    # DeepSpeed chooses its accelerator when it is imported: after that.
    from pipeline.training.batches import MicroBatch
    from pipeline.training.engine import Engine
    from pipeline.training.load_model import build_on_device
    from pipeline.training.step_totals import StepSums

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    config = run_of(work)
    layout = Layout(1)
    settings = load_deepspeed_config(config.deepspeed, layout)
    groups = ProcessGroups(layout)
    base = open_base(config.base)
    model = build_on_device(config, base, settings, groups, device)
    if work.method == "preserve":
        load_base(model, base, SINGLE)
        _set_expansion(model)
    else:
        method_for(config.method, Path(), SEED).load(model, base, SINGLE)
    engine = Engine(model, config, settings, groups)
    tokens = work.tokens(base.spec.vocab_size)
    positions = torch.arange(work.sequence_length).expand_as(tokens)
    batch = MicroBatch(tokens, _next_tokens(tokens), positions, None)

    def step() -> Step:
        watch = Stopwatch()
        sums = StepSums(device)
        losses = engine.loss(batch)
        engine.backward(losses.total)
        engine.end_micro_batch(LEARNING_RATE)
        sums.add(losses, batch)
        totals = sums.over_all_ranks(engine, stop=False)
        took = watch.elapsed()
        assert totals.applied and totals.nll_per_token is not None, "random weights train"
        return Step(took.seconds, took.cpu_seconds, totals.nll_per_token)

    return step


def _next_tokens(tokens: Tensor) -> Tensor:
    """The targets [B, S]: the last token of a row predicts nothing, as with transformers."""
    targets = torch.full_like(tokens, UNPREDICTED)
    targets[:, :-1] = tokens[:, 1:]
    return targets


@torch.no_grad()
def _set_expansion(model: nn.Module) -> None:
    """Random values for what Preserve adds, in place of those of an initial expansion."""
    for name, parameter in model.named_parameters():
        if is_base(name):
            continue
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
