"""Loss on answers only, and scores of answers, compared with transformers on the same tokens."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from pipeline.config.run import load_config
from tests.bases import STORIES
from tests.data.helpers import pair_ids
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, prepared, tokenize_corpora

pytestmark = pytest.mark.full

IGNORED = -100
# stories260K predicts most of these answers; some are wrong on purpose.
PAIRS = [
    (f"Once upon a time, there was a {kind} {name}. The {name} was very", f" {answer}")
    for kind in ("little", "big")
    for name in ("girl", "boy", "dog", "cat")
    for answer in ("happy.", "sad.", "happy and", "blue")
] + [("Once upon a", " time, there"), ("Lily and", " Tom")] * 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of runs on these pairs, as training and as held-out corpus."""
    folder = tmp_path_factory.mktemp("pairs")
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps({"question": q, "text": a}) + "\n" for q, a in PAIRS))
    corpus = {"input": [str(path)], "heldout_input": [str(path)], "prompt_key": "question"}
    changes = {
        "data__corpora": {"pairs": corpus},
        "data__replay_fraction": 0,
        "validation__max_sequences": 64,
    }
    tokenize_corpora(load_config(make_run(folder / "run", folder / "tokens", **changes)))
    return {"tokens": folder / "tokens", **changes}


@pytest.fixture(scope="module")
@torch.no_grad()
def by_transformers() -> dict[str, Any]:
    """Each pair alone: the nll of the answer with its end, its first token, and whether greedy
    decoding gives it.
    """
    model = AutoModelForCausalLM.from_pretrained(STORIES)
    rows = []
    for prompt, answer in PAIRS:
        asked, answered = pair_ids(prompt, answer)
        logits = model(torch.tensor([asked + answered])).logits[0, len(asked) - 1 : -1]
        targets = torch.tensor(answered)
        nll = F.cross_entropy(logits, targets, reduction="none").double()
        chosen = logits.argmax(dim=-1) == targets
        rows.append((nll.sum(), len(answered), chosen[0], math.exp(-nll[0]), chosen.all()))
    nll, tokens, hard, soft, exact = (float(sum(column)) for column in zip(*rows, strict=True))
    text_bytes = sum(len(answer) for _, answer in PAIRS)
    return {
        "total": nll,
        "nll_per_token": nll / tokens,
        "bits_per_byte": nll / math.log(2) / text_bytes,
        "first_token_accuracy": hard / len(rows),
        "first_token_probability": soft / len(rows),
        "exact_match": exact / len(rows),
    }


def scores_and_loss(config: Path) -> tuple[dict[str, float], float]:
    """On a rank: the figures of the model before its first step, and the summed nll of an epoch."""
    trainer = prepared(config)
    (score,) = trainer.validator.validate(trainer.engine).values()
    sequences = len(trainer.validator.heldout["pairs"])
    total, read = 0.0, 0
    for batch in (
        batch for step in range(sequences) for batch in trainer.batches.micro_batches(step)
    ):
        if read < sequences:
            total += float(trainer.engine.loss(batch).total.detach())
            read += len(batch.tokens)
    assert read == sequences, "a pass is no whole number of micro-batches"
    return {"nll_per_token": score.nll_per_token, **score.figures()}, total


@pytest.mark.parametrize("tp_size", [1, 2])
def test_figures_equal_transformers(settings, by_transformers, tmp_path, tp_size):
    settings = settings | {"parallel__tp_size": tp_size, "schedule__micro_batch_size": 1}
    configs = [
        make_run(tmp_path / variant, zero=1, method__variant=variant, **settings)
        for variant in ("adapt", "route")
    ]
    for rank in run_ranks(
        in_turn, tp_size, [partial(scores_and_loss, config) for config in configs]
    ):
        for figures, total in rank:
            assert total == pytest.approx(by_transformers["total"], rel=1e-5)
            for name in figures.keys() & by_transformers.keys():
                assert figures[name] == pytest.approx(by_transformers[name], rel=1e-5), name
            assert figures.keys() >= by_transformers.keys() - {"total"}
    assert 0.3 < by_transformers["first_token_accuracy"] < 1
    assert 0 <= by_transformers["exact_match"] < by_transformers["first_token_accuracy"]
