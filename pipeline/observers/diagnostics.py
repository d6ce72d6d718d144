"""Drift of a model from its base: cheap figures at every validation, on a single probe batch.

Per layer: the cosine of the base stream to the same stream with every W12, adapter and added layer masked, and the norm
of each kind of block; and the KL divergence of the model from its base.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.parallel.ranks import summed
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.layers import block_norms
from pipeline.training.batches import MicroBatch, collate
from pipeline.training.engine import Engine
from pipeline.training.observer import Observer, RunContext, ValidationEvent


def make_diagnostics(context: RunContext) -> Diagnostics:
    """Diagnostics on the first held-out samples of the base's own domain, or without any on a training batch."""
    config, heldout = context.inputs.config, context.heldout
    replayed = [name for name in heldout if config.data.corpora[name].role == "replay"]
    if not replayed:
        return Diagnostics(context.engine, context.probe, "training")
    samples = heldout[replayed[0]]
    rows = [samples[index] for index in range(min(config.schedule.micro_batch_size, len(samples)))]
    probe = collate(rows, config.data.document_mask).on(context.device)
    return Diagnostics(context.engine, probe, replayed[0])


class Diagnostics(Observer):
    """Measures a model on `probe`; nothing if the base itself trains, because then there is no reference."""

    def __init__(self, engine: Engine, probe: MicroBatch, probe_name: str) -> None:
        self.engine = engine
        self.probe = probe
        self.probe_name = probe_name

    def on_validation(self, event: ValidationEvent) -> None:
        event.figures.update(self.measure())

    def measure(self) -> dict[str, float]:
        """The figures by name, equal on all ranks; every rank must call it."""
        engine = self.engine
        if not engine.model.keeps_base:
            return {}
        with engine.evaluating():
            with base_streams(engine.model.layers) as preserved:
                engine.hidden_states(self.probe, "preserved")
            with base_streams(engine.model.layers) as adapted:
                hidden = engine.hidden_states(self.probe, "model")
            chunks = engine.logit_chunks(hidden, engine.hidden_states(self.probe, "base"))
            divergence = sum(kl_divergence(logits, base, engine.tensor_parallel) for logits, base in chunks)
        figures = {f"kl_from_base/{self.probe_name}": divergence / self.probe.tokens.numel()}
        for layer, (x, reference) in enumerate(zip(adapted, preserved, strict=True)):
            figures[f"base_stream_cosine/layer_{layer:02d}"] = mean_cosine(x, reference, engine.tensor_parallel)
        for kind, norms in block_norms(engine.squared_norms()).items():
            figures |= {f"norm_{kind}/layer_{layer:02d}": norm for layer, norm in norms.items()}
        # A training batch is each data-parallel rank's own, of one size: all ranks report, and act on, the mean.
        means = summed(torch.tensor([*figures.values()], dtype=torch.float64, device=self.probe.tokens.device))
        return dict(zip(figures, (means / dist.get_world_size()).tolist(), strict=True))


@contextmanager
def base_streams(layers: nn.ModuleList) -> Iterator[list[Tensor]]:
    """Collects the last base stream of each layer, bottom up: [B, S, D], or [B, S / tp_size, D] (sequence parallel).

    For Route it is that of the adapted path.
    """
    streams: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:  # noqa: ANN401
        def hook(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
            streams[layer] = output[0]

        return hook

    handles = [module.register_forward_hook(keep(layer)) for layer, module in enumerate(layers)]
    collected: list[Tensor] = []
    try:
        yield collected
        collected.extend(streams[layer] for layer in sorted(streams))
    finally:
        for handle in handles:
            handle.remove()


def mean_cosine(x: Tensor, reference: Tensor, tp: TensorParallel) -> float:
    """The mean over tokens of cos(x, reference); 1 for an unchanged base stream.

    x, reference: [B, S, D]; with sequence parallelism this rank's positions, [B, S / tp_size, D].
    """
    mean = F.cosine_similarity(x.float(), reference.float(), dim=-1).mean()
    if tp.sequence_parallel:
        dist.all_reduce(mean, group=tp.group)
        mean /= tp.size
    return float(mean)


def kl_divergence(logits: Tensor, reference: Tensor, tp: TensorParallel) -> float:
    """KL(reference ‖ model) in nats, summed over tokens.

    logits, reference: [N, V / tp_size] in fp32, this rank's columns without padding.
    """
    log_p, log_q = log_probabilities(reference, tp), log_probabilities(logits, tp)
    terms = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    if tp.size > 1:
        dist.all_reduce(terms, group=tp.group)
    return float(terms.sum())


def log_probabilities(logits: Tensor, tp: TensorParallel) -> Tensor:
    """log softmax over a vocabulary that is split over the ranks: [N, V / tp_size] -> the same shape."""
    if tp.size == 1:
        return logits.log_softmax(dim=-1)
    largest = logits.amax(dim=-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.group)
    shifted = logits - largest
    normaliser = shifted.exp().sum(dim=-1, keepdim=True)
    dist.all_reduce(normaliser, group=tp.group)
    return shifted - torch.log(normaliser)
