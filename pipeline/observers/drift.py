"""How far a model has drifted from its base: their KL divergence at every validation."""

from __future__ import annotations

import torch

from pipeline.parallel.cross_entropy import ColumnRange, greedy_choices_, kl_and_logit_gradient_
from pipeline.training.batches import collate
from pipeline.training.observer import Observer, ValidationEvent
from pipeline.training.trainer import Trainer


class Drift(Observer):
    """Measures KL(base || model) on a single batch, and how often another token is the likeliest.

    The batch has the first held-out samples of `validation.probe`, or else of a replayed corpus,
    the same on every rank. Nothing is measured if there is neither, or if the base itself trains:
    then there is no reference.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.corpus = _probed_corpus(trainer)
        if self.corpus is not None:
            config = trainer.config
            samples = trainer.inputs.samples.heldout[self.corpus]
            count = min(config.schedule.micro_batch_size, len(samples))
            rows = [samples[index] for index in range(count)]
            self.probe = collate(rows, config.data.document_mask).on(trainer.device)

    def on_validation(self, event: ValidationEvent) -> None:
        if self.corpus is None:
            return
        engine = self.trainer.engine  # of the stage that trains now
        output = engine.model.output
        columns = ColumnRange(
            first=output.vocabulary.first, vocab_size=output.vocab_size, tp=engine.tensor_parallel
        )
        total = 0.0
        changed = 0
        with engine.evaluating():
            # Every rank runs the same batch, because under ZeRO-3 each layer's gathering is a
            # collective.
            model = engine.hidden_states(self.probe, "model")
            base = engine.hidden_states(self.probe, "base")
            for logits, reference in engine.logit_chunks(model, base):
                ignored = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
                # Collectives over the tensor-parallel ranks' columns: all of them call these. The
                # choices come first, because the divergence overwrites the logits.
                chosen = greedy_choices_(logits, **columns)
                changed += int((chosen != greedy_choices_(reference, **columns)).sum())
                kl, _ = kl_and_logit_gradient_(logits, reference, ignored, **columns)
                # Each chunk is summed in fp32, and the chunks in Python's fp64.
                total += float(kl.sum())
        tokens = self.probe.tokens.numel()
        event.figures[f"kl_from_base/{self.corpus}"] = total / tokens
        event.figures[f"changed_top_tokens/{self.corpus}"] = changed / tokens


def _probed_corpus(trainer: Trainer) -> str | None:
    """The corpus of `validation.probe`, or the first replayed one that has a held-out part."""
    if not trainer.engine.model.keeps_base:
        return None
    if trainer.config.validation.probe is not None:
        return trainer.config.validation.probe
    for name in trainer.inputs.samples.heldout:
        if trainer.config.data.corpora[name].role == "replay":
            return name
    return None
