"""Exports in the hands of training libraries: transformers' Trainer, PEFT, and what TRL's
SFTTrainer calls."""

from __future__ import annotations

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, TrainableTokensConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    QuantoConfig,
    Trainer,
    TrainingArguments,
)

from pipeline.conversion.model_card import LORA_TARGETS
from pipeline.extensions.combination.combine import base_entries
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.configuration_scale_combined import CombinedConfig
from pipeline.hf.remote_code.modeling_scale_combined import CombinedForCausalLM
from pipeline.hf.remote_code.scale_math import NEVER
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
        ("llama tied", "scale", {}),  # the router's choice of two paths
        ("llama tied", "scale", GATES["both"]),
        *(("neox", "own lora", gate) for gate in GATES.values()),
        ("llama", "own adapt from 0", GATES["both"]),
        ("gemma2", "own adapt", GATES["both"]),
    ],
)
def test_backbone_and_head_give_the_logits_the_loss_and_its_gradients(name, method, gate, load):
    """As SFTTrainer computes it: hidden states of `base_model`, and `weight` and `bias` of the
    output embeddings."""
    assert_same_with_hidden_states(load(name, method, **gate))


@pytest.mark.parametrize(("name", "method"), [("llama tied", "adapt"), ("neox", "own lora")])
def test_new_tokens_have_no_probability_after_a_closed_one_by_hidden_states_too(name, method, load):
    model = load(name, method, **GATES["both"])
    with_new_tokens(model)
    tokens = some_tokens(model.config, 2, 12)
    logits = model(tokens).logits
    is_never = (logits[..., -7:] == NEVER).all(-1)
    assert is_never.any() and not is_never.all()
    assert_same_with_hidden_states(model)


def with_new_tokens(model) -> None:
    """Makes the last tokens of a model new ones of an extended vocabulary."""
    model.config.base_vocab_size = model.config.vocab_size - 7
    model.output.set_vocabulary(model.config)


def assert_same_with_hidden_states(model) -> None:
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
    capped = load("gemma2", "adapt", **GATES["both"])
    with_new_tokens(capped)
    combined = CombinedForCausalLM(CombinedConfig(**base_entries(scale_config().to_dict())))
    for model, reason in (
        (capped, "new tokens .* logits are capped"),
        (combined, "for inference"),
    ):
        assert model.get_output_embeddings() is None
        with pytest.raises(ValueError, match=rf"no backbone .*{reason}.*labels=labels") as caught:
            model.base_model(input_ids=some_tokens(model.config, 1, 4))
        assert "\n" not in str(caught.value)


def adapted_tokens(model, configuration):
    """The logits with changed rows of two tokens, and the model with these rows merged."""
    tokens = torch.tensor([[5, 6, 7, 8, 9, 5]])
    before = model(tokens).logits
    adapted = get_peft_model(model, configuration)
    rows = [one for key, one in adapted.named_parameters() if "trainable_tokens_delta" in key]
    assert rows and all(one.requires_grad for one in rows)
    assert_near(adapted(tokens).logits, before, PARITY)
    for one in rows:
        one.data += torch.randn(one.shape, generator=torch.Generator().manual_seed(0))
    changed = adapted(tokens).logits
    assert (changed - before).abs().max() > 1e-3
    assert_near(adapted.merge_and_unload()(tokens).logits, changed, PARITY)
    return rows


@torch.no_grad()
def test_peft_trains_tokens_of_models_as_wide_as_their_base(load):
    for configuration in (
        TrainableTokensConfig(token_indices=[5, 6]),
        LoraConfig(target_modules=["query.base"], trainable_token_indices=[5, 6]),
    ):
        adapted_tokens(load("neox", "own lora", opens="sometimes"), configuration)


@torch.no_grad()
def test_peft_trains_tokens_of_a_wider_model_in_both_of_its_embeddings(load):
    names = ["embedding.base", "embedding.expansion"]
    rows = adapted_tokens(
        load("llama", "own adapt", opens="sometimes"),
        LoraConfig(
            target_modules=["query.base"], trainable_token_indices={name: [5, 6] for name in names}
        ),
    )
    model = load("llama", "own adapt", opens="sometimes")
    assert sum(one.shape[1] for one in rows) == model.get_input_embeddings().embedding_dim


def test_tokens_of_a_tied_model_are_not_trained_in_half(load):
    model = load("llama tied", "adapt")
    adapted = get_peft_model(
        model, TrainableTokensConfig(token_indices=[5, 6], target_modules=["embedding.base"])
    )
    with pytest.raises(ValueError, match=r"trainable tokens: .* one matrix"):
        adapted(torch.tensor([[5, 6]]))


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "method"), [("stories260K", "own lora"), ("stories260K", "adapt")]
)
def test_an_adapter_is_loaded_with_its_base_by_one_call(name, method, exports, tmp_path):
    folder, _ = exports(name, method, **GATES["both"])
    model = load_hf_model(folder)
    tokens = some_tokens(model.config, 1, 12)
    targets = ["query.base"] if method == "own lora" else list(LORA_TARGETS)
    adapted = get_peft_model(
        model, LoraConfig(target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    ).eval()
    expected = adapted(tokens).logits
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "adapter")
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert_near(found(tokens).logits, expected, PARITY)
    embedding = found.get_input_embeddings()
    assert embedding.weight.shape == (embedding.num_embeddings, embedding.embedding_dim)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "method"), [("llama tied", "adapt"), ("llama tied", "own lora"), ("llama", "lora")]
)
def test_quantisers_take_every_map_of_the_layers(name, method, exports):
    """Of a tied model they would leave out what ends as its head: all `attention.output.base`."""
    folder, _ = exports(name, method, **GATES["both"])
    model = load_hf_model(folder)
    tokens = some_tokens(model.config, 2, 12)
    asked = QuantoConfig(weights="int8")
    quantised = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked)
    assert asked.modules_to_not_convert is None
    left = [key for key, one in quantised.named_modules() if type(one) is torch.nn.Linear]
    assert not left
    assert type(quantised.layers[0].attention.output.base).__name__ == "QLinear"
    logits = model(tokens).logits
    assert 0 < (quantised(tokens).logits - logits).abs().max() < 0.2 * logits.std()


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
