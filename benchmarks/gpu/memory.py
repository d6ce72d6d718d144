"""The memory of forward and backward passes at a real size, against the figures of the estimate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.setting import CheckRow, Setting, memory_row
from benchmarks.gpu.small_run import write_config
from benchmarks.gpu_step.models import our_method, set_randomly
from benchmarks.gpu_step.peak_memory import PeakMemory
from benchmarks.results import BASES
from pipeline.config.run import RunConfig, load_config
from pipeline.methods.build_model import build_model
from pipeline.model.attention import Documents
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.micro_batch import measure_micro_batch

_GIB = 2**30


class Case(NamedTuple):
    """A method, and the settings that change what a micro-batch takes."""

    method: str
    checkpointing: str = "none"
    keeps: str = "nothing"
    precision: str = "bf16"

    def __str__(self) -> str:
        checkpointing = self.checkpointing
        if self.keeps != "nothing":
            checkpointing += f" but {self.keeps}"
        return f"{self.method}, checkpointing {checkpointing}, base in {self.precision}"


_CASES = (
    Case("fft"),
    Case("lora"),
    Case("preserve"),
    Case("adapt"),
    Case("route"),
    Case("adapt", checkpointing="all"),
    Case("adapt", precision="nf4"),
    Case("adapt", checkpointing="all", precision="nf4"),
    Case("adapt", precision="fp8"),
    Case("adapt", checkpointing="all", keeps="attention"),
    Case("adapt", checkpointing="all", keeps="products"),
)


def check_memory(setting: Setting) -> Iterator[CheckRow]:
    """What a micro-batch of each method takes in bf16, beyond the weights and without gradients
    that ZeRO keeps."""
    spec = read_spec(BASES / ("llama-3.2-1b.json" if setting.on_gpu else "llama-1m.json"))
    length = 8192 if setting.on_gpu else 64
    for case in _CASES:
        config = _config(case, spec, length, setting)
        estimated = _estimated_gib(config, spec)
        model = _random_model(config, spec, setting)
        batch = _batch(spec, length, setting)
        # The first backward pass also sets up libraries, whose memory stays: the second counts.
        for _ in range(2):
            peak = PeakMemory(setting.device)
            model(*batch).total.backward()
        yield memory_row(f"a micro-batch of 1 x {length}: {case}", estimated, peak.gib())
        yield _waits_row(case, _waits(model, batch, setting))
        # Before the next case builds its model: a 1B and its activations may take half of a GPU.
        del model


def _config(case: Case, spec: DecoderSpec, length: int, setting: Setting) -> RunConfig:
    """The run that the estimate is asked for; its corpus is never read."""
    path = write_config(
        setting,
        "memory",
        method=our_method(case.method, spec, 3).model_dump(mode="json", exclude_none=True),
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
        activation_checkpointing=case.checkpointing,
        recomputation_keeps=case.keeps,
        base_precision=case.precision,
    )
    return load_config(path)


def _estimated_gib(config: RunConfig, spec: DecoderSpec) -> float:
    """The estimate's figures of what the measurement sees: all but weights and kept gradients."""
    costs = measure_micro_batch(
        config,
        spec,
        1,
        config.activation_checkpointing,
        torch.bfloat16,
        config.recomputation_keeps,
    )
    return (costs.activation_bytes + costs.loss_bytes + costs.temporary_bytes) / _GIB


def _random_model(config: RunConfig, spec: DecoderSpec, setting: Setting) -> CausalDecoder:
    """The run's model with random weights, whose gradients are dropped as they are made."""
    with default_dtype(torch.bfloat16), setting.device:
        model = build_model(config, spec, SINGLE)
    for parameter in model.parameters():
        set_randomly(parameter)
        if parameter.requires_grad:
            # ZeRO moves a gradient into its own buffer as soon as it is there.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    return model


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _batch(spec: DecoderSpec, length: int, setting: Setting) -> tuple[Any, ...]:
    """One row of random tokens, as the arguments of the model's forward pass."""
    tokens = torch.randint(spec.vocab_size, (1, length))
    documents = Documents.of(torch.zeros_like(tokens))
    documents = documents.moved(lambda tensor: tensor.to(setting.device))
    tokens = tokens.to(setting.device)
    positions = torch.arange(length, device=setting.device).unsqueeze(0)
    return tokens, tokens, positions, documents


def _waits_row(case: Case, waits: int | None) -> CheckRow:
    """Whether the host runs ahead of the GPU: a GPU that it waits for has nothing queued."""
    check = f"the host does not wait for the GPU in it: {case}"
    if waits is None:
        return CheckRow(check, None, "seen on a GPU only")
    # The gradient of a trained embedding is torch's own, which sorts tokens and waits once for
    # how many differ.
    allowed = 1 if case.method == "fft" else 0
    return CheckRow(check, waits <= allowed, f"{waits} waits, {allowed} allowed")


def _waits(model: CausalDecoder, batch: tuple[Any, ...], setting: Setting) -> int | None:
    """How often the host waits for the GPU while it hands out a micro-batch, by torch's own
    count."""
    if not setting.on_gpu:
        return None
    with warnings.catch_warnings(record=True) as seen:
        # By default a warning is given once for each line of code.
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            model(*batch).total.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)
