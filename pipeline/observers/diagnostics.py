"""Drift of a model from its base: cheap figures at every validation, on a single probe batch.

Per layer: the cosine of the base stream to the same stream with every W12, adapter and added layer masked, and the norm
of each kind of block; and the KL divergence of the model from its base.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.decoder import LogitsPath
from pipeline.model.output import HiddenStates
from pipeline.parallel.layers import kl_and_logit_gradient_
from pipeline.parallel.ranks import summed
from pipeline.scale.layers import block_norms
from pipeline.training.batches import collate
from pipeline.training.observer import Observer, ValidationEvent
from pipeline.training.trainer import Trainer


class Diagnostics(Observer):
    """Measures a model on the first held-out samples of the base's own domain, or without any on a training batch.

    Nothing if the base itself trains, because then there is no reference.
    """

    def __init__(self, trainer: Trainer) -> None:
        config, self.engine = trainer.config, trainer.engine
        self.probe, self.probe_name = trainer.probe, "training"
        for name, samples in trainer.inputs.samples.heldout.items():
            if config.data.corpora[name].role == "replay":
                rows = [samples[index] for index in range(min(config.schedule.micro_batch_size, len(samples)))]
                self.probe, self.probe_name = collate(rows, config.data.document_mask).on(trainer.device), name
                break

    def on_validation(self, event: ValidationEvent) -> None:
        if self.engine.model.keeps_base:
            event.figures.update(self._measure())

    def _measure(self) -> dict[str, float]:
        """The figures by name, equal on all ranks; every rank must call it."""
        tp, output = self.engine.tensor_parallel, self.engine.model.output
        with self.engine.evaluating():
            _, preserved = self._run("preserved")
            hidden, adapted = self._run("model")
            base = self.engine.hidden_states(self.probe, "base")
            divergence = 0.0
            for logits, reference in self.engine.logit_chunks(hidden, base):
                ignored = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
                kl, _ = kl_and_logit_gradient_(
                    logits, reference, ignored, first=output.first, vocab_size=output.vocab_size, tp=tp
                )
                divergence += float(kl.sum())
        figures = {f"kl_from_base/{self.probe_name}": divergence / self.probe.tokens.numel()}
        for layer, (x, reference) in enumerate(zip(adapted, preserved, strict=True)):
            # Of this rank's positions: all ranks' are averaged below.
            cosine = F.cosine_similarity(x.float(), reference.float(), dim=-1).mean()
            figures[f"base_stream_cosine/layer_{layer:02d}"] = float(cosine)
        for kind, norms in block_norms(self.engine.squared_norms()).items():
            figures |= {f"norm_{kind}/layer_{layer:02d}": norm for layer, norm in norms.items()}
        # A training batch is each data-parallel rank's own, of one size: all ranks report, and act on, the mean.
        means = summed(torch.tensor([*figures.values()], dtype=torch.float64, device=self.probe.tokens.device))
        return dict(zip(figures, (means / dist.get_world_size()).tolist(), strict=True))

    def _run(self, path: LogitsPath) -> tuple[HiddenStates, list[Tensor]]:
        """The last hidden states along `path`, and the base stream after each layer (under Route of its last call)."""
        layers = self.engine.model.layers
        streams: dict[int, Tensor] = {}
        handles = [
            layer.register_forward_hook(lambda _, __, output, at=at: streams.update({at: output[0]}))
            for at, layer in enumerate(layers)
        ]
        try:
            hidden = self.engine.hidden_states(self.probe, path)
        finally:
            for handle in handles:
                handle.remove()
        return hidden, [streams[at] for at in sorted(streams)]
