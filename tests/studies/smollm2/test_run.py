"""A real model through whole runs: 3 tensor-parallel ranks, other layouts, every export."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from pipeline.errors import FINISHED, RESUME_LATER
from pipeline.hf.load import load_hf_model
from tests.distributed import run_ranks
from tests.studies.smollm2.runs import (
    ENGLISH,
    KOREAN,
    LORA,
    TIMEOUT_S,
    scale_cpt,
    settings_of,
    trained,
)
from tests.training.runs import losses, make_run, train

pytestmark = pytest.mark.full


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
    run = trained(tmp_path / "run", tokens, settings_of(smollm2, LORA))
    scale_cpt("gate", run)
    scale_cpt("convert", run)
    base = load_hf_model(smollm2)
    gated = load_hf_model(run.parent / "hf")
    with torch.no_grad():
        assert torch.equal(gated(ENGLISH).logits, base(ENGLISH).logits)
        assert not torch.equal(gated(KOREAN).logits, base(KOREAN).logits)
    del gated
    merged = tmp_path / "merged"
    scale_cpt("convert", run, "--without-gate", "--format", "merged", "--output", merged)
    assert json.loads((merged / "config.json").read_text())["model_type"] == "llama"

    plain = {"name": "lora", "rank": 9}
    run = trained(tmp_path / "plain", tokens, settings_of(smollm2, plain, gate=None))
    scale_cpt("convert", run, "--format", "peft", "--output", tmp_path / "adapter")
    scale_cpt("convert", run, "--format", "merged", "--output", tmp_path / "plain_merged")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain_merged")
    with torch.no_grad():
        expected = merged_model(KOREAN).logits
        found = adapted(KOREAN).logits
    assert (found - expected).abs().max() < 1e-3


def test_full_fine_tuning_leaves_in_four_bits_behind_a_gate(smollm2, tokens, tmp_path):
    run = trained(tmp_path / "run", tokens, settings_of(smollm2, {"name": "fft"}))
    scale_cpt("gate", run)
    scale_cpt("convert", run, "--format", "difference", "--bits", 4)
    base = load_hf_model(smollm2)
    found = load_hf_model(run.parent / "hf")
    with torch.no_grad():
        assert torch.equal(found(ENGLISH).logits, base(ENGLISH).logits)
        assert not torch.equal(found(KOREAN).logits, base(KOREAN).logits)
