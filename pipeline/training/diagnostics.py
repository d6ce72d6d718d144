"""How a model moves away from its base while it trains, cheap enough to leave on.

Every figure goes to TensorBoard and metrics.jsonl: per layer the cosine of the base stream to what it is with every
W12, adapter and added layer masked, the norm of each kind of block, and the KL divergence of the model from its base,
all on one probe batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pipeline.config.run import RunConfig
from pipeline.data.samples import HeldoutSamples
from pipeline.scale.diagnostics import kl_divergence, mean_cosine
from pipeline.scale.linear import block_kind
from pipeline.training.batches import MicroBatch, collate
from pipeline.training.engine import Engine


class Diagnostics:
    """Measures a model on `probe`; where the base itself trains, so that there is none to compare with, nothing."""

    def __init__(self, probe: MicroBatch, probe_name: str) -> None:
        self.probe = probe
        self.probe_name = probe_name

    def run(self, engine: Engine) -> dict[str, float]:
        """The figures, under the names they have in TensorBoard; every rank must call it, and all get the same."""
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
        return figures | block_norms(engine.squared_norms())


@contextmanager
def base_streams(layers: nn.ModuleList) -> Iterator[list[Tensor]]:
    """The base stream that each layer last gave, from the bottom up; under Route the adapted path's.

    [B, S, D], or this rank's positions of it.
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


def block_norms(squares: Mapping[str, float]) -> dict[str, float]:
    """Per layer and kind of block, the Frobenius norm over all its maps; `squares` are those of each parameter."""
    sums: dict[str, float] = defaultdict(float)
    for name, square in squares.items():
        kind = block_kind(name)
        if kind is not None and name.startswith("layers."):
            sums[f"norm_{kind}/layer_{int(name.split('.')[1]):02d}"] += square
    return {name: total**0.5 for name, total in sorted(sums.items())}


def make_probe(heldout: Mapping[str, HeldoutSamples], config: RunConfig, batch: MicroBatch) -> Diagnostics:
    """The probe: the first held-out samples of the base's own domain, or, where the run has none, a training batch."""
    replayed = [name for name in heldout if config.data.corpora[name].role == "replay"]
    if not replayed:
        return Diagnostics(batch, "training")
    samples = heldout[replayed[0]]
    rows = [samples[index] for index in range(min(config.schedule.micro_batch_size, len(samples)))]
    return Diagnostics(collate(rows, config.data.document_mask, batch.tokens.device), replayed[0])
