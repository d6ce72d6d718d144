"""What people do with any model of transformers, done with the exported one."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from tests.conversion.checkpoints import generate_greedily
from tests.conversion.exports import check_vocabulary_keeps_its_size
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens

pytestmark = pytest.mark.full

# Windows and original contexts shorter than the texts; layers of two kinds, with and without
# position embedding; two rotary embeddings; capped scores.
MODELS = {
    "mistral window": "adapt",
    "exaone4": "scale",
    "gemma2": "adapt",
    "gemma3": "scale",
    "phi3": "adapt",
}
LENGTH, NEW_TOKENS = 24, 12
generate = partial(generate_greedily, new_tokens=NEW_TOKENS)


@pytest.fixture
def load(exports):
    return lambda name, **options: AutoModelForCausalLM.from_pretrained(
        exports(name, MODELS[name])[0], **options
    ).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "implementation"),
    [("exaone4", "sdpa"), ("gemma3", "eager"), ("gemma2", "eager"), ("gemma3", "flex_attention")],
)
def test_every_attention_implementation_gives_the_training_models_logits(
    name, implementation, load, exports
):
    model = load(name, attn_implementation=implementation)
    tokens = some_tokens(model.config, 2, 40)
    expected = exports(name, MODELS[name])[1].logits(tokens)
    assert_near(model(tokens, use_cache=False).logits, expected, PARITY)
    if name == "gemma2":
        assert load(name).config._attn_implementation == "eager"  # sdpa caps no scores
        with pytest.raises(ValueError, match="does not support"):
            load(name, attn_implementation="sdpa")


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, load):
    model = load("gemma3").train()
    tokens = some_tokens(model.config, 2, 24)

    def gradients():
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients()
    for key, gradient in expected.items():
        assert_near(found[key], gradient, PARITY, key)


@torch.no_grad()
@pytest.mark.parametrize("name", ["exaone4", "mistral window"])
def test_outputs_are_what_the_library_asks_for(name, load):
    """Embedded tokens in place of tokens, tuples, hidden states, and the logits of some tokens."""
    model = load(name)
    tokens = some_tokens(model.config, 2, 9)
    out = model(tokens, labels=tokens)
    expected = out.logits
    assert torch.allclose(
        out.loss, cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    )
    embedded = model.get_input_embeddings()(tokens)
    assert embedded.shape == (2, 9, model.config.hidden_size + model.config.expansion_hidden_size)
    assert torch.equal(model(inputs_embeds=embedded).logits, expected)
    continued = [
        generate(model, tokens),
        generate(
            model, tokens[:, :0], inputs_embeds=embedded, attention_mask=torch.ones_like(tokens)
        ),
    ]
    assert torch.equal(continued[0][:, 9:], continued[1])
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model(tokens, inputs_embeds=embedded)

    assert torch.equal(model(tokens, return_dict=False)[0], expected)
    assert torch.equal(model(tokens, logits_to_keep=2).logits, expected[:, -2:])
    assert torch.equal(
        model(tokens, logits_to_keep=torch.tensor([1, 5])).logits, expected[:, [1, 5]]
    )

    states = model(tokens, output_hidden_states=True).hidden_states
    assert model(tokens).hidden_states is None and len(states) == model.config.num_hidden_layers + 1
    assert torch.equal(states[0], embedded) and {state.shape for state in states} == {
        embedded.shape
    }
    if not model.config.routed:
        weights = torch.cat([model.output.base, model.output.expansion], dim=1)
        assert_near(states[-1] @ weights.T, expected, PARITY)


def test_the_vocabulary_keeps_its_size(load):
    check_vocabulary_keeps_its_size(
        load("phi3"), "extended before training, by scale-cpt vocabulary"
    )


def test_embeddings_may_need_gradients(load):
    """As adapters on a frozen model with gradient checkpointing ask for."""
    model = load("phi3").train().requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert model(some_tokens(model.config, 2, 9)).logits.requires_grad


@pytest.mark.parametrize("key", ["phi3", "qwen2_moe", "glm4_moe"])
def test_a_model_that_is_not_loaded_has_initial_values(key, exports):
    config = AutoConfig.from_pretrained(exports(key, "adapt")[0])
    model_class = type(AutoModelForCausalLM.from_pretrained(exports(key, "adapt")[0]))
    torch.use_deterministic_algorithms(True)  # memory that is not written to is NaN
    try:
        model = model_class(config)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.output.expansion.std() > 0


def test_continuous_batching_generates_the_same_or_is_refused(load):
    """Requests of different lengths in one batch, over a paged cache that the library sizes by the
    configuration."""
    model = load("mistral window")
    prompts = [
        some_tokens(model.config, length, seed=length).tolist() for length in (5, LENGTH, 11)
    ]
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    paged = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    found = model.generate_batch(prompts, settings, paged)
    assert len(found) == len(prompts)
    for prompt, answer in zip(prompts, found.values(), strict=True):
        alone = generate(model, torch.tensor([prompt]))[0, len(prompt) :].tolist()
        assert answer.generated_tokens == alone

    for name, reason in (("exaone4", "two sets of heads"), ("phi3", "with a text's length")):
        with pytest.raises(ValueError, match=reason):
            load(name).generate_batch([[1, 2, 3]], max_new_tokens=2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_a_forward_pass_makes_no_tensor_from_python_values(name, load, monkeypatch):
    """On a GPU each would be a copy from the host: a wait, and illegal while a CUDA graph is
    captured."""
    model, made = load(name), torch.tensor
    tokens = some_tokens(model.config, 2, 40)
    expected = model(tokens, use_cache=False).logits

    def refused(*values, **options):
        assert "remote_code" not in sys._getframe(1).f_code.co_filename
        return made(*values, **options)

    monkeypatch.setattr(torch, "tensor", refused)
    assert torch.equal(model(tokens, use_cache=False).logits, expected)
    monkeypatch.undo()
    # Casting leaves the rotary frequencies alone.
    cast, loaded = load(name).to(torch.bfloat16), load(name, dtype=torch.bfloat16)
    assert torch.equal(cast(tokens, use_cache=False).logits, loaded(tokens, use_cache=False).logits)
