"""A published rival on the base of a frontier study: PEFT's orthogonal subspace fine-tuning (OSF).

    python -m studies.frontier.osf studies/configs/frontier_quick.yaml

OSF freezes the largest singular directions of every linear map and trains the rest by gradients
orthogonal to these. The trained map replaces the base's. OSF reads the samples of the study's full
fine-tuning in the same order, with the same schedule, and is scored on the same held-out samples.
Every learning rate is tried with the study's first seed, and the one that learns most Korean runs
with all. The study must have made its base (`make frontier` does so first).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from peft import OSFConfig, get_peft_model
from torch import Tensor, nn

from pipeline import command_line, log
from pipeline.config.run import RunConfig
from pipeline.data.dataset.packing import IGNORED, Sample
from pipeline.data.dataset.samples import TrainingSamples, load_heldout
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.evaluation.table import over_seeds, table
from pipeline.hf.load import load_hf_model
from pipeline.list_options import join_repeated_lists
from pipeline.run_folder.metrics import readable
from pipeline.training.learning_rate import learning_rate
from studies.harness.run_study import open_study
from studies.harness.runs import StudyRuns

RATES = [3e-3, 1e-2, 3e-2, 1e-1]
Scores = dict[str, float]
"""Perplexities by corpus."""
_logger = log.get_logger(__name__)


def mean_nll(model: nn.Module, samples: Sequence[Sample]) -> tuple[Tensor, int]:
    """The mean nll of the predicted tokens, and their number; attention stays within documents."""
    tokens = _stacked(samples, "tokens")
    targets = _stacked(samples, "targets")
    positions = _stacked(samples, "positions")
    documents = _stacked(samples, "document_ids")
    # transformers would let a row's documents see each other: [B, 1, S, S] says what a token sees.
    seen = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    # The smallest number instead of -inf, as transformers' own masks have.
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return nll, int((targets != IGNORED).sum())


def _stacked(samples: Sequence[Sample], field: str) -> Tensor:
    """A field of all samples, of shape [S] each, as one tensor: [B, S]."""
    return torch.from_numpy(np.stack([getattr(sample, field) for sample in samples]))


@torch.no_grad()
def perplexities(model: nn.Module, config: RunConfig) -> Scores:
    """The perplexity of each corpus, on the samples that the study's validation reads."""
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    heldout = load_heldout(config.data, tokenizer_fingerprint=fingerprint)
    found: Scores = {}
    for name, samples in heldout.items():
        total = 0.0
        predicted = 0
        for index in range(min(config.validation.max_sequences, len(samples))):
            nll, count = mean_nll(model, [samples[index]])
            if count:
                # The mean over no token is NaN.
                total += float(nll) * count
                predicted += count
        found[name] = math.exp(total / predicted)
    return found


def trained(config: RunConfig, effective_rank: float) -> nn.Module:
    """The base of `config` after its steps by OSF, in place of full fine-tuning.

    `effective_rank` is the frozen share of the singular directions.
    """
    schedule = config.schedule
    model = get_peft_model(load_hf_model(config.base), OSFConfig(effective_rank=effective_rank))
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    samples = TrainingSamples(config.data, seed=config.seed, tokenizer_fingerprint=fingerprint)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=schedule.betas, weight_decay=schedule.weight_decay)
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, schedule)
        # The sample at each index is the one that the study's runs read there.
        first = step * schedule.global_batch_size
        batch = [samples[first + index] for index in range(schedule.global_batch_size)]
        loss, _ = mean_nll(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, schedule.gradient_clipping)
        optimizer.step()
    merged: nn.Module = model.merge_and_unload()
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    join_repeated_lists(parser)
    add = parser.add_argument
    add("study", type=Path, help="a frontier study's YAML file")
    add(
        "--data",
        type=Path,
        default=Path("examples/data"),
        help="the folder of its texts (default: examples/data)",
    )
    add(
        "--learning-rates",
        type=float,
        nargs="+",
        default=RATES,
        help="the learning rates to try (default: 3e-3 1e-2 3e-2 1e-1)",
    )
    add(
        "--effective-rank",
        type=float,
        default=0.5,
        help="the frozen share of the directions (default: PEFT's 0.5)",
    )
    options = parser.parse_args()
    runs = open_study(options.study, options.data)
    print(compare(runs, options.learning_rates, options.effective_rank))


def compare(runs: StudyRuns, rates: Sequence[float], effective_rank: float) -> str:
    """Runs OSF at every rate, and at the best with every seed; returns the table."""
    first, *others = runs.study.seeds
    config = runs.compared("fft", rates[0], first).config
    base = perplexities(load_hf_model(config.base), config)
    found: dict[float, list[Scores]] = {}
    for rate in rates:
        found[rate] = [_scores(runs, rate, first, effective_rank)]

    # As the study chooses rates: by the new corpora alone, whatever is forgotten.
    learned: dict[float, float] = {}
    for rate, (scores,) in found.items():
        logarithms: list[float] = []
        for name, perplexity in scores.items():
            if config.data.corpora[name].role == "new":
                logarithms.append(math.log(perplexity))
        learned[rate] = sum(logarithms)
    best = min(learned, key=learned.__getitem__)
    for seed in others:
        found[best].append(_scores(runs, best, seed, effective_rank))

    rows = [["base", "", *map(readable, base.values())]]
    for rate, of_seeds in found.items():
        row = ["OSF", f"{rate:g}"]
        for name in base:
            row.append(over_seeds([scores[name] for scores in of_seeds], readable))
        rows.append(row)
    return table(["", "rate", *base], rows)


def _scores(runs: StudyRuns, rate: float, seed: int, effective_rank: float) -> Scores:
    config = runs.compared("fft", rate, seed).config
    scores = perplexities(trained(config, effective_rank), config)
    _logger.info("OSF at %g, seed %d: %s", rate, seed, scores)
    return scores


if __name__ == "__main__":
    command_line.run(main)
