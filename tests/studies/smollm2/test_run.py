"""A real model through whole runs: 3 tensor-parallel ranks, other layouts, every export."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from pipeline.config.run import load_config
from pipeline.errors import FINISHED, RESUME_LATER
from pipeline.hf.load import load_hf_model
from tests.distributed import run_ranks
from tests.texts import REVIEWS_HELDOUT
from tests.training.runs import losses, make_run, tokenize_corpora, train, write_config

pytestmark = pytest.mark.full

TIMEOUT_S = 1800.0
LORA = {"name": "lora", "rank": 9, "open_rows": {"min_count": 20}, "open_gains": True}
BOOKS = REVIEWS_HELDOUT.parents[1] / "en" / "gutenberg.heldout.jsonl.zst"
ENGLISH = torch.tensor([[504, 2470, 282, 4649, 314]])


def scale_cpt(*arguments: object) -> None:
    """Runs a command in a process of its own, and shows what it printed where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def tokens(smollm2, tmp_path_factory) -> Path:
    """The held-out reviews and books in the model's own tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    tokenize_corpora(
        load_config(write_config(folder / "run", folder, **settings_of(smollm2, LORA)))
    )
    return folder


def settings_of(base: Path, method: dict[str, object], **changes: object) -> dict[str, object]:
    korean, english = [str(REVIEWS_HELDOUT)], [str(BOOKS)]
    return {
        "base": str(base),
        "method": method,
        "data__sequence_length": 64,
        "data__corpora": {
            "korean": {"input": korean, "heldout_input": korean},
            "english": {"input": english, "heldout_input": english, "role": "replay"},
        },
        "data__replay_fraction": 0.0,
        "schedule": {
            "steps": 4,
            "global_batch_size": 6,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
        },
        "validation": {"every_steps": 100, "max_sequences": 2},
        "checkpoints": {"every_steps": 2},
        "gate": {"tokens": 1000},
        "zero": 1,
        **changes,
    }


def test_three_tensor_parallel_ranks_split_its_nine_heads_and_any_layout_resumes(
    smollm2, tokens, tmp_path
):
    settings = settings_of(smollm2, LORA)
    alone = make_run(tmp_path / "alone", tokens, **settings)
    assert run_ranks(train, 1, alone, timeout_s=TIMEOUT_S) == [FINISHED]
    split = make_run(tmp_path / "split", tokens, **settings)
    # The first step on three tensor-parallel ranks, the others on three data-parallel ones.
    stopped = run_ranks(
        partial(train, split, stop=True, changes=["parallel.tp_size=3"]), 3, timeout_s=TIMEOUT_S
    )
    assert stopped == [RESUME_LATER] * 3
    assert run_ranks(train, 3, split, timeout_s=TIMEOUT_S) == [FINISHED] * 3
    expected, found = losses(alone.parent), losses(split.parent)
    assert len(found) == len(expected) == 4
    assert found[3] < found[0]
    assert found == pytest.approx(expected, abs=2e-4)


def test_it_leaves_gated_and_merged_and_for_peft(smollm2, tokens, tmp_path):
    run = make_run(tmp_path / "run", tokens, **settings_of(smollm2, LORA))
    assert run_ranks(train, 1, run, timeout_s=TIMEOUT_S) == [FINISHED]
    scale_cpt("gate", run)
    scale_cpt("convert", run)
    base = load_hf_model(smollm2)
    gated = load_hf_model(run.parent / "hf")
    korean = torch.tensor([[33085, 246, 181, 130, 251, 183, 240, 129] * 4])
    with torch.no_grad():
        assert torch.equal(gated(ENGLISH).logits, base(ENGLISH).logits)
        assert not torch.equal(gated(korean).logits, base(korean).logits)
    del gated
    merged = tmp_path / "merged"
    scale_cpt("convert", run, "--without-gate", "--format", "merged", "--output", merged)
    assert json.loads((merged / "config.json").read_text())["model_type"] == "llama"

    plain = {"name": "lora", "rank": 9}
    run = make_run(tmp_path / "plain", tokens, **settings_of(smollm2, plain, gate=None))
    assert run_ranks(train, 1, run, timeout_s=TIMEOUT_S) == [FINISHED]
    scale_cpt("convert", run, "--format", "peft", "--output", tmp_path / "adapter")
    scale_cpt("convert", run, "--format", "merged", "--output", tmp_path / "plain_merged")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain_merged")
    with torch.no_grad():
        expected = merged_model(korean).logits
        found = adapted(korean).logits
    assert (found - expected).abs().max() < 1e-3


def test_full_fine_tuning_leaves_in_four_bits_behind_a_gate(smollm2, tokens, tmp_path):
    run = make_run(tmp_path / "run", tokens, **settings_of(smollm2, {"name": "fft"}))
    assert run_ranks(train, 1, run, timeout_s=TIMEOUT_S) == [FINISHED]
    scale_cpt("gate", run)
    scale_cpt("convert", run, "--format", "difference", "--bits", 4)
    base = load_hf_model(smollm2)
    found = load_hf_model(run.parent / "hf")
    with torch.no_grad():
        assert torch.equal(found(ENGLISH).logits, base(ENGLISH).logits)
