"""What a real model of GGUF must be here: its ids, and the logits of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.checks.parity import check_against_transformers
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.hf.load import load_hf_model
from pipeline.hf.probe_texts import PROBE_TEXTS
from pipeline.model.from_hf import open_base

ENGLISH = (
    "The old bridge across the river will be repaired in spring. Until then the buses take a "
    "longer way through the valley. Many people who drive to work every day are not happy about "
    "it, but the mayor promises that everything will be finished before the summer begins."
)


@pytest.fixture(scope="module")
def model(smollm2):
    return load_hf_model(smollm2)


def test_numbers_are_cut_into_digits_and_the_template_has_its_own_tokens(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer("Hello world").input_ids == [19556, 905]
    # Two spaces, and two new lines, are a token each: GPT-2's pattern would leave one to the digit.
    spelled = [tokenizer.decode(number) for number in tokenizer("  12\n\n34").input_ids]
    assert spelled == ["  ", "1", "2", "\n\n", "3", "4"]
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert asked.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert asked.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_start|><|im_end|>").input_ids == [1, 2]


def test_training_and_serving_cut_text_alike(smollm2):
    ours = load_tokenizer(smollm2)
    theirs = AutoTokenizer.from_pretrained(smollm2)
    for text in PROBE_TEXTS.values():
        assert ours.reference.encode([text]).ids.tolist() == theirs(text).input_ids


@torch.no_grad()
def test_it_knows_english_and_that_paris_is_the_capital(smollm2, model):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(ENGLISH, return_tensors="pt").input_ids
    bits = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1) / math.log(2)
    # 1.07 bits a byte; 1.29 with the rows of queries and keys in llama.cpp's order.
    assert bits / len(ENGLISH.encode()) < 1.15
    asked = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(asked).logits[0, -1].argmax()) == " Paris"


def test_our_decoder_has_the_logits_of_transformers(smollm2):
    check_against_transformers(open_base(smollm2))  # raises where they differ by more than rounding
