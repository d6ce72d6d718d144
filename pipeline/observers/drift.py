"""How far a model has drifted from its base: their KL divergence at every validation, on a single batch."""

from __future__ import annotations

import torch

from pipeline.parallel.cross_entropy import kl_and_logit_gradient_
from pipeline.training.batches import collate
from pipeline.training.observer import Observer, ValidationEvent
from pipeline.training.trainer import Trainer


class Drift(Observer):
    """Measures a model on the first held-out samples of the base's own domain, which are the same on every rank.

    Nothing without a held-out part of role replay, or if the base itself trains: then there is no reference.
    """

    def __init__(self, trainer: Trainer) -> None:
        config, self.engine = trainer.config, trainer.engine
        self.corpus: str | None = None
        for name, samples in trainer.inputs.samples.heldout.items():
            if self.engine.model.keeps_base and config.data.corpora[name].role == "replay":
                rows = [
                    samples[index]
                    for index in range(min(config.schedule.micro_batch_size, len(samples)))
                ]
                self.corpus, self.probe = (
                    name,
                    collate(rows, config.data.document_mask).on(trainer.device),
                )
                break

    def on_validation(self, event: ValidationEvent) -> None:
        if self.corpus is None:
            return
        output, tp, total = self.engine.model.output, self.engine.tensor_parallel, 0.0
        with self.engine.evaluating():
            model, base = (
                self.engine.hidden_states(self.probe, "model"),
                self.engine.hidden_states(self.probe, "base"),
            )
            for logits, reference in self.engine.logit_chunks(model, base):
                ignored = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
                kl, _ = kl_and_logit_gradient_(
                    logits,
                    reference,
                    ignored,
                    first=output.vocabulary.first,
                    vocab_size=output.vocab_size,
                    tp=tp,
                )
                total += float(kl.sum())
        event.figures[f"kl_from_base/{self.corpus}"] = total / self.probe.tokens.numel()
