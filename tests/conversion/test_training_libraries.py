"""Exports in the hands of training libraries: transformers' Trainer, PEFT, and what TRL's
SFTTrainer calls."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from pipeline.conversion.model_card import LORA_TARGETS
from pipeline.extensions.combination.combine import base_entries
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.configuration_scale_combined import CombinedConfig
from pipeline.hf.remote_code.modeling_scale_combined import CombinedForCausalLM
from tests.conversion.checkpoints import scale_config
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens

GATES = {"shut": {"opens": "never"}, "open": {"opens": "always"}, "both": {"opens": "sometimes"}}


@pytest.fixture
def load(exports):
    """A fresh model of the export of a base by its name, method and gate."""
    return lambda name, method, **gate: load_hf_model(exports(name, method, **gate)[0])


def trainer(model, folder, tokens) -> Trainer:
    data = [{"input_ids": row, "labels": row} for row in tokens]
    options = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        folder, max_steps=2, learning_rate=1e-3, logging_strategy="no", **options
    )
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)


@pytest.mark.parametrize(
    ("method", "gate"), [("scale", {}), ("adapt", {}), ("adapt", GATES["both"])]
)
def test_transformers_trainer_trains_evaluates_and_predicts(method, gate, load, tmp_path):
    model = load("llama tied", method, **gate)
    tokens = some_tokens(model.config, 4, 12)
    of_library = trainer(model, tmp_path, tokens)
    with torch.no_grad():
        expected = model(tokens, labels=tokens)
    found = of_library.predict(of_library.eval_dataset)
    assert_near(torch.tensor(found.predictions), expected.logits, PARITY)
    before = of_library.evaluate()["eval_loss"]
    assert before == pytest.approx(float(expected.loss), rel=1e-5)
    of_library.train()
    assert of_library.evaluate()["eval_loss"] < before


@pytest.mark.parametrize(
    ("name", "method", "gate"),
    [
        ("llama tied", "adapt", {}),
        ("llama tied", "preserve", {}),
        ("gemma2", "adapt", {}),  # its logits are capped
        *(("llama tied", "adapt", gate) for gate in GATES.values()),
    ],
)
def test_backbone_and_head_give_the_logits_the_loss_and_its_gradients(name, method, gate, load):
    """As SFTTrainer computes it: hidden states of `base_model`, and `weight` and `bias` of the
    output embeddings."""
    model = load(name, method, **gate)
    tokens = some_tokens(model.config, 2, 12)
    mask = torch.ones_like(tokens)

    def loss_of_hidden_states():
        states = model.base_model(
            input_ids=tokens, attention_mask=mask, use_cache=False
        ).last_hidden_state
        head = model.get_output_embeddings()
        assert head.bias is None
        logits = states @ head.weight.T
        cap = getattr(model.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits, cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {
            key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None
        }

    expected = model(tokens, attention_mask=mask, labels=tokens)
    logits, loss = loss_of_hidden_states()
    assert_near(logits, expected.logits, PARITY)
    wanted, found = gradients(expected.loss), gradients(loss)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert_near(found[key], gradient, PARITY, key)
    with torch.no_grad():  # where the base may run alone
        assert_near(loss_of_hidden_states()[0], expected.logits, PARITY)


def test_a_model_without_such_a_head_says_so(load):
    routed = load("llama tied", "scale")
    new_tokens = load("llama tied", "adapt", **GATES["both"])
    new_tokens.config.base_vocab_size -= 7
    combined = CombinedForCausalLM(CombinedConfig(**base_entries(scale_config().to_dict())))
    for model, reason in (
        (routed, "logits of two paths"),
        (new_tokens, "new tokens"),
        (combined, "for inference"),
    ):
        assert model.get_output_embeddings() is None
        with pytest.raises(ValueError, match=rf"no backbone .*{reason}.*labels=labels") as caught:
            model.base_model(input_ids=some_tokens(model.config, 1, 4))
        assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "method", "opens"),
    [
        ("llama tied", "adapt", "never"),
        ("llama tied", "adapt", "sometimes"),
        ("llama tied", "preserve", "sometimes"),
        ("qwen2_moe", "adapt", "never"),
    ],
)
def test_adapters_on_the_expansions_blocks_leave_closed_text_to_the_bit(name, method, opens, load):
    """Those that the card and docs/gate.md name; on all linear maps, as PEFT offers, closed text is
    another."""
    model = load(name, method, opens=opens)
    tokens = some_tokens(model.config, 4, 24)
    is_closed = torch.ones_like(tokens, dtype=torch.bool)
    x_up = model.streams(model.embedding(tokens), tokens=tokens).paths[0].x_up
    if x_up is not None:
        is_closed = (x_up == 0).all(-1)
    if method == "adapt":  # whose closed tokens attend to open ones
        is_closed = is_closed.cummin(1).values
    assert is_closed.any() and is_closed.all() == (opens == "never")

    def adapted(targets):
        # Random adapters, as trained ones.
        return get_peft_model(
            load(name, method, opens=opens),
            LoraConfig(target_modules=targets, init_lora_weights=False),
        )

    expected = model(tokens).logits
    of_blocks = adapted(list(LORA_TARGETS)).eval()
    found = of_blocks(tokens).logits
    assert torch.equal(found[is_closed], expected[is_closed])
    assert opens == "never" or not torch.allclose(found[~is_closed], expected[~is_closed])
    assert torch.equal(of_blocks.merge_and_unload()(tokens).logits[is_closed], expected[is_closed])
    of_all = adapted("all-linear").eval()(tokens).logits
    assert (of_all - expected)[is_closed].abs().max() > 0.1
