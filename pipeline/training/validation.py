"""Held-out scores (perplexity, bits per byte, answers), and the step-0 gate that compares a model with its base.

A score is identical to the last bit in every parallel layout.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checks.inputs import RunInputs
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.dataset.packing import IGNORED
from pipeline.data.dataset.samples import HeldoutSamples
from pipeline.errors import PreservationError
from pipeline.model.chunked_loss import Losses
from pipeline.model.output import perplexity
from pipeline.parallel.ranks import raise_on_all_ranks, summed
from pipeline.training.batches import MicroBatch, collate
from pipeline.training.engine import Engine


@dataclass(frozen=True)
class AnswerScore:
    """Means over answers; each token is predicted from the true tokens before it."""

    first_token_accuracy: float
    """how often the answer's first token is the most probable of all ("hard")"""
    first_token_probability: float
    """its mean probability ("soft")"""
    exact_match: float
    """how often greedy decoding gives exactly the answer and its end"""


@dataclass(frozen=True)
class HeldoutScore:
    """How well the model predicts one corpus."""

    nll_per_token: float
    bits_per_byte: float
    answers: AnswerScore | None = None

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll_per_token)

    def figures(self) -> dict[str, float]:
        """The parts of the score by their names in training.json and metrics.jsonl."""
        figures = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return figures | asdict(self.answers) if self.answers else figures


class Validation:
    """Scores the model on the first `max_sequences` samples of each held-out part."""

    def __init__(self, inputs: RunInputs, rank: int, device: torch.device) -> None:
        config, layout = inputs.config, inputs.layout
        self.heldout, self.device = inputs.samples.heldout, device
        self.settings, self.micro_batch_size = config.validation, config.schedule.micro_batch_size
        self.document_mask = config.data.document_mask
        self.tp_rank, self.dp_rank, self.dp_size = (
            layout.tp_rank(rank),
            layout.dp_rank(rank),
            layout.dp_size,
        )

    def run(self, engine: Engine) -> dict[str, HeldoutScore]:
        """The score of every corpus that has a held-out part; every rank must call it."""
        with engine.evaluating():
            return {name: self._score(engine, samples) for name, samples in self.heldout.items()}

    def _score(self, engine: Engine, samples: HeldoutSamples) -> HeldoutScore:
        count = min(self.settings.max_sequences, len(samples))
        # One row per sequence, each filled by one rank: the sum below has the same order in every layout.
        rows = torch.zeros(count, 6, dtype=torch.float64, device=self.device)
        for first in range(0, count, self.micro_batch_size * self.dp_size):
            start = first + self.dp_rank * self.micro_batch_size
            own = range(min(start, count), min(start + self.micro_batch_size, count))
            # All ranks must run the same forwards: sample 0 fills up a micro-batch where this rank has too few.
            read = [samples[index] for index in (*own, *[0] * (self.micro_batch_size - len(own)))]
            batch = collate(read, self.document_mask).pinned_for(self.device).on(self.device)
            losses = engine.loss(batch)
            if self.tp_rank == 0 and own:
                starts = torch.from_numpy(np.stack([sample.answer_starts for sample in read])).to(
                    self.device
                )
                predicted = (batch.targets != IGNORED).sum(dim=1)
                nll = torch.stack([losses.nll.double().sum(dim=1), predicted.double()], dim=1)
                answers = answer_sums(losses, batch.targets, starts)
                rows[own.start : own.stop] = torch.cat([nll, answers], dim=1)[: len(own)]
        nll_sum, predicted_count, answers, *right = summed(rows).sum(dim=0).tolist()
        nll_per_token = nll_sum / predicted_count if predicted_count else math.nan
        bits_per_byte = nll_per_token * samples.tokens / (samples.bytes * math.log(2))
        score = AnswerScore(*(count / answers for count in right)) if answers else None
        return HeldoutScore(nll_per_token, bits_per_byte, score)


def answer_sums(losses: Losses, targets: Tensor, answer_starts: Tensor) -> Tensor:
    """Per sequence: the number of answers, of first tokens that greedy decoding would choose, the sum of these tokens'
    probabilities, and the number of whole answers that greedy decoding would give.

    targets, answer_starts: [B, S]; the losses without gradients. Returns float64 [B, 4]. An answer that the end of the
    sample cuts counts by its part in the sample.
    """
    assert losses.is_greedy_choice is not None
    starts = answer_starts.double()
    probabilities = losses.nll.double().neg().exp()
    # Answers are numbered from 1 in each sequence; number 0 is the rest of one that began in an earlier sample.
    answer = answer_starts.long().cumsum(dim=1)
    missed = (targets != IGNORED) & ~losses.is_greedy_choice
    misses = torch.zeros(
        len(targets), targets.shape[1] + 1, dtype=torch.float64, device=targets.device
    )
    misses.scatter_add_(1, answer, missed.double())
    whole = misses.gather(1, answer) == 0
    found = [starts, starts * losses.is_greedy_choice, starts * probabilities, starts * whole]
    return torch.stack([values.sum(dim=1) for values in found], dim=1)


def check_preservation(engine: Engine, probe: MicroBatch, config: RunConfig) -> float:
    """The step-0 gate: the largest difference between the model's logits and those of its base alone, over all ranks'
    probes; every rank must call it.

    The base runs through the same weights and kernels at the same layout: unless it is exactly 0.0, rank 0 raises a
    PreservationError, and the others SystemExit.
    """
    with engine.evaluating():
        hidden = engine.hidden_states(probe, "model"), engine.hidden_states(probe, "base")
        differences = [(model - base).abs().max() for model, base in engine.logit_chunks(*hidden)]
    largest = torch.nan_to_num(torch.stack(differences), nan=torch.inf).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if (difference := largest.item()) != 0.0:
        source, remedy = (
            config.base,
            "the base's files may have changed while they were read: start again",
        )
        if isinstance(config.method, ScaleMethod):
            source, remedy = (
                config.initial_expansion_folder,
                "remove the folder and make it again with scale-cpt upscale",
            )
        if engine.tensor_parallel.size > 2 and probe.tokens.is_cuda:
            remedy += "; if it persists, set NCCL_NVLS_ENABLE=0: NVLink's reductions may add up in any order"
        raise_on_all_ranks(
            PreservationError(
                f"{source}: at step 0 the logits of method {config.method.name} differ from the base model's by up to "
                f"{difference:.3g}, expected 0.0; {remedy}"
            )
        )
    return difference
