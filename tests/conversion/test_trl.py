"""TRL's trainers on exports: they take hidden states and the head, and never the model's logits."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn.functional import cross_entropy, log_softmax
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from pipeline.conversion.model_card import LORA_TARGETS
from pipeline.hf.load import load_hf_model
from tests.tolerances import PARITY

# What `config init` writes; wider, with two passes below the gate; the router's two paths.
METHODS = ["own lora", pytest.param("own adapt from 0", marks=pytest.mark.full), "scale"]
PROMPT = "Once upon a time there was a"
CHOSEN = " little dog who liked to play in the park"
REJECTED = " big red car"
OPTIONS = {
    "max_steps": 3,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_strategy": "no",
    "gradient_checkpointing": True,
}


@pytest.fixture
def export(exports, request):
    """A model by its method, with the tokenizer of its folder."""

    def load(method: str):
        gate = {} if method == "scale" else {"opens": "sometimes"}
        folder, _ = exports("stories260K", method, **gate)
        return load_hf_model(folder), AutoTokenizer.from_pretrained(folder)

    return load


def state(model) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def assert_trained(model, before: dict[str, torch.Tensor]) -> None:
    """Its weights changed, and a gate did not."""
    changed = {
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert any(".attention." in key for key in changed)
    assert not any(key.startswith("token_gate.") for key in changed)
    assert all(value.isfinite().all() for value in model.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_sft_has_the_models_own_loss_and_lowers_it(method, export, tmp_path):
    model, tokenizer = export(method)
    data = Dataset.from_list([{"text": PROMPT + CHOSEN}, {"text": PROMPT + REJECTED}])
    trainer = SFTTrainer(
        model,
        SFTConfig(tmp_path, **OPTIONS),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
    )
    [batch] = trainer.get_eval_dataloader()
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    before = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(float(expected), rel=PARITY)
    weights = state(model)
    trainer.train()
    assert_trained(model, weights)
    assert trainer.evaluate()["eval_loss"] < before


def test_sft_trains_adapters_on_the_blocks_that_the_card_names(export, tmp_path):
    model, tokenizer = export("adapt")
    data = Dataset.from_list([{"text": PROMPT + CHOSEN}] * 2)
    trainer = SFTTrainer(
        model,
        SFTConfig(tmp_path, **OPTIONS | {"learning_rate": 1e-2}),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=list(LORA_TARGETS)),
    )
    before = trainer.evaluate()["eval_loss"]
    weights = state(trainer.model)
    trainer.train()
    changed = [
        key
        for key, value in trainer.model.state_dict().items()
        if not torch.equal(value, weights[key])
    ]
    assert changed and all(".lora_" in key for key in changed)
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.parametrize("method", METHODS)
def test_dpo_compares_the_probabilities_that_the_model_gives(method, export, tmp_path):
    model, tokenizer = export(method)
    data = Dataset.from_list([{"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED}] * 2)
    trainer = DPOTrainer(
        model,
        args=DPOConfig(tmp_path, **OPTIONS),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
    )
    [batch] = trainer.get_eval_dataloader()
    chosen = batch["input_ids"][:2]
    completion = batch["completion_mask"][:2]
    with torch.no_grad():
        logits = model(chosen, batch["attention_mask"][:2]).logits
    of_labels = log_softmax(logits[:, :-1], dim=-1).gather(-1, chosen[:, 1:, None])[..., 0]
    expected = (of_labels * completion[:, 1:]).sum(1).mean()
    before = trainer.evaluate()
    assert before["eval_logps/chosen"] == pytest.approx(float(expected), rel=PARITY)
    weights = state(model)
    trainer.train()
    assert_trained(model, weights)
    assert trainer.evaluate()["eval_rewards/margins"] > before["eval_rewards/margins"]


@pytest.mark.parametrize("method", METHODS)
def test_grpo_trains_on_what_the_model_writes(method, export, tmp_path):
    model, tokenizer = export(method)
    written = []

    def short_words(completions: list[str], **_: object) -> list[float]:
        written.extend(completions)
        return [-float(len(completion)) for completion in completions]

    options = OPTIONS | {"max_completion_length": 8, "num_generations": 2, "temperature": 1.0}
    trainer = GRPOTrainer(
        model,
        short_words,
        GRPOConfig(tmp_path, **options, beta=0.1),
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * 4),
        processing_class=tokenizer,
    )
    weights = state(model)
    trainer.train()
    assert len(written) >= 2 * OPTIONS["max_steps"]
    assert_trained(model, weights)
