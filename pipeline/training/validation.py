"""Held-out scores (perplexity, bits per byte, answers), and the preservation check.

The losses of tokens are summed in one order, whatever the number of data-parallel ranks and the
ZeRO stage. Tensor parallelism rounds the losses themselves otherwise: it adds partial sums.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checks.inputs import RunInputs
from pipeline.config.method import starts_from_expansion
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
    """Means over answers; each token is predicted from the true tokens before it.

    Attributes:
        first_token_accuracy: how often the answer's first token is the most probable of all
            ("hard").
        first_token_probability: the mean probability of the first token ("soft").
        exact_match: how often greedy decoding gives exactly the answer and its end.
    """

    first_token_accuracy: float
    first_token_probability: float
    exact_match: float


@dataclass(frozen=True)
class HeldoutScore:
    """How well the model predicts one corpus; `answers` where the corpus has prompts."""

    nll_per_token: float
    bits_per_byte: float
    answers: AnswerScore | None = None

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll_per_token)

    def figures(self) -> dict[str, float]:
        """The parts of the score by their names in training.json and metrics.jsonl."""
        figures = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        if self.answers is not None:
            figures.update(asdict(self.answers))
        return figures


def score_figures(scores: dict[str, HeldoutScore]) -> dict[str, float]:
    """The scores by their names in metrics.jsonl, `<figure>/<corpus>`."""
    figures: dict[str, float] = {}
    for corpus, score in scores.items():
        for figure, value in score.figures().items():
            figures[f"{figure}/{corpus}"] = value
    return figures


class Validator:
    """Scores the model on the first `max_sequences` samples of each held-out part."""

    def __init__(self, inputs: RunInputs, rank: int, device: torch.device) -> None:
        config = inputs.config
        layout = inputs.layout
        self.heldout = inputs.samples.heldout
        self.device = device
        self.settings = config.validation
        self.micro_batch_size = config.schedule.micro_batch_size
        self.document_mask = config.data.document_mask
        self.tp_rank = layout.tp_rank(rank)
        self.dp_rank = layout.dp_rank(rank)
        self.dp_size = layout.dp_size

    def validate(self, engine: Engine) -> dict[str, HeldoutScore]:
        """The score of every corpus that has a held-out part; every rank must call it."""
        with engine.evaluating():
            return {name: self._score(engine, samples) for name, samples in self.heldout.items()}

    def _score(self, engine: Engine, samples: HeldoutSamples) -> HeldoutScore:
        count = min(self.settings.max_sequences, len(samples))
        # A row per sequence, which one rank fills: the nll, the predicted tokens, and the four
        # `answer_sums`. The sum over all rows then has the same order in every layout.
        rows = torch.zeros(count, 6, dtype=torch.float64, device=self.device)
        for first in range(0, count, self.micro_batch_size * self.dp_size):
            start = first + self.dp_rank * self.micro_batch_size
            own = range(min(start, count), min(start + self.micro_batch_size, count))
            self._fill(rows, own, engine, samples)
        # One all-reduce a held-out part. Each row is one rank's and zeros of the others: exact in
        # any order.
        nll, tokens, answers, *correct = summed(rows).sum(dim=0).tolist()

        nll_per_token = math.nan
        if tokens > 0:
            nll_per_token = nll / tokens
        # Both counts are of the whole held-out part: see `HeldoutSamples`.
        # nats a token times tokens a byte, over ln 2: comparable across tokenizers.
        bits_per_byte = nll_per_token * samples.tokens / (samples.bytes * math.log(2))
        score = None
        if answers > 0:
            score = AnswerScore(*(count / answers for count in correct))
        return HeldoutScore(nll_per_token, bits_per_byte, score)

    def _fill(self, rows: Tensor, own: range, engine: Engine, samples: HeldoutSamples) -> None:
        """Runs a micro-batch on every rank, and fills the rows of this rank's `own` sequences."""
        # All ranks must run the same forwards: where this rank has too few sequences, sample 0
        # fills up its micro-batch.
        filling = [0] * (self.micro_batch_size - len(own))
        read = [samples[index] for index in (*own, *filling)]
        batch = collate(read, self.document_mask).pinned_for(self.device).on(self.device)
        losses = engine.loss(batch)
        if self.tp_rank != 0 or not own:
            return  # tensor-parallel neighbours have the same losses
        starts = np.stack([sample.answer_starts for sample in read])
        answers = answer_sums(losses, batch.targets, torch.from_numpy(starts).to(self.device))
        nll = losses.nll.double().sum(dim=1)
        tokens = (batch.targets != IGNORED).sum(dim=1).double()
        figures = torch.cat([torch.stack([nll, tokens], dim=1), answers], dim=1)
        rows[own.start : own.stop] = figures[: len(own)]


def answer_sums(losses: Losses, targets: Tensor, answer_starts: Tensor) -> Tensor:
    """Sums over the answers of each sequence.

    Args:
        losses: computed without gradients, [B, S].
        targets: the tokens to predict, [B, S].
        answer_starts: True at the first token of each answer, [B, S].

    Returns:
        float64 [B, 4]: the number of answers; how many of their first tokens greedy decoding would
        choose; the sum of these tokens' probabilities; and how many whole answers greedy decoding
        would give. An answer that the end of the sample cuts counts by its part in the sample.
    """
    assert losses.is_greedy_choice is not None
    starts = answer_starts.double()
    probabilities = losses.nll.double().neg().exp()
    # Answers are numbered from 1 in each sequence; number 0 is the rest of one that began in an
    # earlier sample.
    answer = answer_starts.long().cumsum(dim=1)
    missed = (targets != IGNORED) & ~losses.is_greedy_choice
    batch_size, length = targets.shape
    misses = torch.zeros(batch_size, length + 1, dtype=torch.float64, device=targets.device)
    misses.scatter_add_(1, answer, missed.double())  # [B, S + 1]: the misses of each answer
    is_whole = misses.gather(1, answer) == 0  # [B, S]: whether this token's answer has none
    sums = [
        starts.sum(dim=1),
        (starts * losses.is_greedy_choice).sum(dim=1),
        (starts * probabilities).sum(dim=1),
        (starts * is_whole).sum(dim=1),
    ]
    return torch.stack(sums, dim=1)


def check_preservation(engine: Engine, probe: MicroBatch, config: RunConfig) -> float:
    """The preservation check: compares the model's logits with those of its base alone.

    The base runs through the same weights and kernels at the same layout, so that the difference
    must be exactly 0.0. Every rank must call it, with a probe of its own.

    Returns:
        The largest difference over all ranks' probes.

    Raises:
        PreservationError: on rank 0, if it is not 0.0. The other ranks raise SystemExit.
    """
    with engine.evaluating():
        of_model = engine.hidden_states(probe, "model")
        of_base = engine.hidden_states(probe, "base")
        differences = []
        for model_logits, base_logits in engine.logit_chunks(of_model, of_base):
            # Each rank compares its own columns in fp32. Frozen weights are the same tensors in
            # both runs, and so are kernels and shapes: any difference is the expansion's.
            differences.append((model_logits - base_logits).abs().max())
    # NaN compares false with everything, and a reduction over ranks may lose it: it counts as
    # infinitely far off.
    largest = torch.nan_to_num(torch.stack(differences), nan=torch.inf).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    difference = largest.item()
    if difference != 0.0:
        source = config.base
        remedy = "the base's files may have changed while they were read: start again"
        if starts_from_expansion(config.method):
            source = config.initial_expansion_folder
            remedy = "remove the folder and make it again with scale-cpt upscale"
        if engine.tensor_parallel.size > 2 and probe.tokens.is_cuda:
            remedy += (
                "; if it persists, set NCCL_NVLS_ENABLE=0: NVLink's reductions may add up in any "
                "order"
            )
        raise_on_all_ranks(
            PreservationError(
                f"{source}: at step 0 the logits of method {config.method.name} differ from the "
                f"base model's by up to {difference:.3g}, expected 0.0; {remedy}"
            )
        )
    return difference
