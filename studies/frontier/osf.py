"""A published rival on the base of a frontier study: orthogonal subspace fine-tuning (OSF), as PEFT has it.

    python -m studies.frontier.osf studies/configs/frontier_quick.yaml

OSF freezes the largest singular directions of every linear map and trains the rest by gradients orthogonal to these.
The trained map replaces the base's. OSF reads the samples of the study's full fine-tuning in the same order, with the
same schedule, and is scored on the same held-out samples. Every learning rate is tried with the study's first seed, and
the one that learns most Korean runs with all. The study must have made its base (`make frontier` does so first).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from peft import OSFConfig, get_peft_model
from torch import Tensor, nn

from pipeline import command_line, log
from pipeline.config.run import RunConfig
from pipeline.config.schedule import learning_rate
from pipeline.data.dataset.packing import IGNORED, Sample
from pipeline.data.dataset.samples import TrainingSamples, load_heldout
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.evaluation.table import over_seeds, readable, table
from pipeline.hf.load import load_hf_model
from studies.harness.run_study import open_study

RATES = [3e-3, 1e-2, 3e-2, 1e-1]
Scores = dict[str, float]
"""Perplexities by corpus."""
_logger = log.get_logger(__name__)


def mean_nll(model: nn.Module, samples: Sequence[Sample]) -> tuple[Tensor, int]:
    """The mean nll of what the samples predict, and how many tokens that are; attention does not cross documents."""
    tokens, targets, positions, documents = (
        torch.from_numpy(np.stack([getattr(sample, field) for sample in samples]))
        for field in ("tokens", "targets", "positions", "document_ids")
    )
    seen = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]  # [B, 1, S, S]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return nll, int((targets != IGNORED).sum())


@torch.no_grad()
def perplexities(model: nn.Module, config: RunConfig) -> Scores:
    """By corpus, on the samples that the study's validation reads."""

    def of(samples: Iterable[Sample]) -> float:
        scored = [mean_nll(model, [sample]) for sample in samples]
        predicted = sum(count for _, count in scored)
        return math.exp(sum(float(nll) * count for nll, count in scored if count) / predicted)

    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    heldout = load_heldout(config.data, tokenizer_fingerprint=fingerprint)
    most = config.validation.max_sequences
    return {
        name: of(samples[at] for at in range(min(most, len(samples))))
        for name, samples in heldout.items()
    }


def trained(config: RunConfig, effective_rank: float) -> nn.Module:
    """The base of `config` after its steps by OSF, in place of full fine-tuning; `effective_rank` is frozen."""
    schedule = config.schedule
    model = get_peft_model(load_hf_model(config.base), OSFConfig(effective_rank=effective_rank))
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    samples = TrainingSamples(config.data, seed=config.seed, tokenizer_fingerprint=fingerprint)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=schedule.betas, weight_decay=schedule.weight_decay)
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, schedule)
        first = step * schedule.global_batch_size
        loss, _ = mean_nll(model, [samples[first + at] for at in range(schedule.global_batch_size)])
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
        help="default: 3e-3 1e-2 3e-2 1e-1",
    )
    add(
        "--effective-rank",
        type=float,
        default=0.5,
        help="the frozen share of the directions (default: PEFT's 0.5)",
    )
    options = parser.parse_args()
    runs = open_study(options.study, options.data)
    found: dict[float, list[Scores]] = {}

    def run(rate: float, seed: int) -> None:
        scores = perplexities(
            trained(runs.compared("fft", rate, seed).config, options.effective_rank), config
        )
        found.setdefault(rate, []).append(scores)
        _logger.info("OSF at %g, seed %d: %s", rate, seed, scores)

    first, *others = runs.study.seeds
    config = runs.compared("fft", options.learning_rates[0], first).config
    base = perplexities(load_hf_model(config.base), config)
    for rate in options.learning_rates:
        run(rate, first)
    new = [name for name in base if config.data.corpora[name].role == "new"]
    best = min(found, key=lambda rate: sum(math.log(found[rate][0][name]) for name in new))
    for seed in others:
        run(best, seed)
    rows = [["base", "", *map(readable, base.values())]]
    for rate, scores in found.items():
        columns = zip(*(one.values() for one in scores), strict=True)
        rows.append(["OSF", f"{rate:g}", *(over_seeds(column, readable) for column in columns)])
    print(table(["", "rate", *base], rows))


if __name__ == "__main__":
    command_line.run(main)
