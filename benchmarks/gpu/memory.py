"""The memory of forward and backward passes at a real size, against the figures of the estimate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.runs import compared, write_config
from benchmarks.gpu.setting import CheckRow, Setting
from benchmarks.gpu_step.models import our_method, set_randomly
from benchmarks.gpu_step.peak_memory import PeakMemory
from benchmarks.results import BASES
from pipeline.config.run import load_config
from pipeline.methods import build_model
from pipeline.model.attention import Documents
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import read_spec
from pipeline.parallel.sharding import default_dtype
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.micro_batch import measure_micro_batch

_GIB = 2**30


def check_memory(setting: Setting) -> Iterator[CheckRow]:
    """What a micro-batch of each method takes in bf16, beyond the weights and without gradients
    that ZeRO keeps."""
    spec = read_spec(BASES / ("llama-3.2-1b.json" if setting.on_gpu else "llama-1m.json"))
    length = 8192 if setting.on_gpu else 64
    cases = [(method, "none", "bf16") for method in ("fft", "lora", "preserve", "adapt", "route")]
    cases += [("adapt", "all", "bf16"), ("adapt", "none", "nf4"), ("adapt", "all", "nf4")]
    cases.append(("adapt", "none", "fp8"))
    cases += [("adapt", f"all but {kept}", "bf16") for kept in ("attention", "products")]
    for method, checkpointing, precision in cases:
        name = f"{method}, checkpointing {checkpointing}, base in {precision}"
        recomputed, _, kept = checkpointing.partition(" but ")
        path = write_config(
            setting,
            "memory",
            method=our_method(method, spec, 3).model_dump(mode="json", exclude_none=True),
            data={
                "folder": "unread",
                "sequence_length": length,
                "corpora": {"text": {"input": ["unread"]}},
            },
            schedule={
                "steps": 1,
                "global_batch_size": 1,
                "micro_batch_size": 1,
                "learning_rate": 1e-4,
            },
            activation_checkpointing=recomputed,
            recomputation_keeps=kept or "nothing",
            base_precision=precision,
        )
        config = load_config(path)
        costs = measure_micro_batch(
            config,
            spec,
            1,
            config.activation_checkpointing,
            torch.bfloat16,
            config.recomputation_keeps,
        )
        estimated = (costs.activation_bytes + costs.loss_bytes + costs.temporary_bytes) / _GIB
        with default_dtype(torch.bfloat16), setting.device:
            model = build_model(config, spec, SINGLE)
        for parameter in model.parameters():
            set_randomly(parameter)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", None))
        tokens = torch.randint(spec.vocab_size, (1, length))
        documents = Documents.of(torch.zeros_like(tokens)).moved(
            lambda tensor: tensor.to(setting.device)
        )
        tokens, positions = (
            tokens.to(setting.device),
            torch.arange(length, device=setting.device).unsqueeze(0),
        )
        for _ in range(2):  # the first also sets up libraries
            peak = PeakMemory(setting.device)
            model(tokens, tokens, positions, documents).total.backward()
        yield compared(f"a micro-batch of 1 x {length}: {name}", estimated, peak.gib())
        waits = _waits(model, (tokens, tokens, positions, documents), setting)
        # The gradient of a trained embedding is torch's own, which sorts tokens and waits once for
        # how many differ.
        allowed = 1 if method == "fft" else 0
        found = "seen on a GPU only" if waits is None else f"{waits} waits, {allowed} allowed"
        passed = None if waits is None else waits <= allowed
        yield CheckRow(f"the host does not wait for the GPU in it: {name}", passed, found)
        del model, parameter


def _waits(model: CausalDecoder, batch: tuple[Any, ...], setting: Setting) -> int | None:
    """How often the host waits for the GPU while it hands out a micro-batch, by torch's own
    count."""
    if not setting.on_gpu:
        return None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            model(*batch).total.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)
