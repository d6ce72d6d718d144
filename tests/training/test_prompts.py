"""Prompts that the model continues at each validation: what transformers' greedy decoding gives, in every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.checks.door import begin
from pipeline.config.run import load_config
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConfigError
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, metrics, train, write_config

PROMPTS = ["Once upon a time", "The little dog", "옛날에"]
SETTINGS = {"validation__every_steps": 3, "schedule__learning_rate": 1e-2}
ASKING = {**SETTINGS, "validation__prompts": PROMPTS, "validation__prompt_tokens": 12}


def written(run: Path) -> list[dict[str, str]]:
    return [line["prompts"] for line in metrics(run) if "prompts" in line]


def greedy(folder: Path) -> dict[str, str]:
    """The same by transformers, in fp32, without a cache."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_tokenizer(STORIES)
    found = {}
    for prompt in PROMPTS:
        ids = [*tokenizer.document_start, *tokenizer.reference.encode([prompt]).ids.tolist()]
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, use_cache=False)[0, len(ids) :]
        found[prompt] = tokenizer.decode([token for token in tokens.tolist() if token not in (1, 2)])
    return found


def test_texts_in_every_layout_and_training_is_not_touched(tokens, tmp_path):
    layouts = {
        "zero1": {"zero": 1},
        "zero3": {"zero": 3, "method__variant": "route"},
        "sequence": {"zero": 1, "parallel__tp_size": 2, "parallel__sequence_parallel": True},
    }
    configs = [make_run(tmp_path / name, tokens, **ASKING, **layout) for name, layout in layouts.items()]
    configs.append(make_run(tmp_path / "silent", tokens, **SETTINGS, **layouts["zero3"]))
    assert run_ranks(in_turn, 2, [partial(train, config) for config in configs]) == [[0] * 4] * 2
    before = greedy(STORIES)
    for name in layouts:
        first, *others = written(tmp_path / name)
        assert first == before, name  # step 0 is the base
        assert len(others) == 2
        assert set(others[-1]) == set(PROMPTS)
    assert written(tmp_path / "zero1") == written(tmp_path / "sequence")
    assert written(tmp_path / "zero3")[-1] != before
    without = [{key: value for key, value in line.items() if key != "prompts"} for line in metrics(tmp_path / "zero3")]
    assert without == metrics(tmp_path / "silent")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ["a"], "prompt_tokens": 512}, "validation.prompts: 'a' has .* expected 1 to 0"),
        ({"prompts": ["word " * 600]}, "validation.prompts: 'word .* expected 1 to 480, the base's context of 512"),
        ({"prompts": ["a"] * 17}, "validation.prompts: .*at most 16"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_anything_is_loaded(tokens, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        begin(load_config(write_config(tmp_path, tokens, validation=changes)), 1, "train")
