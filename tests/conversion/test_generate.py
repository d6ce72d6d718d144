"""The shipped model code, with and without a gate: caches, padding, packed documents, several
devices."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM

from pipeline.hf.load import load_hf_model
from tests.bases import reference
from tests.conversion.checkpoints import generate_greedily, without_this_project
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens

pytestmark = pytest.mark.full

GATE = {"features": "token+running_mean"}
PLAIN = {
    "route": ("llama tied", "scale", {}),
    "adapt": ("llama", "adapt", {}),
    "neox": ("neox", "scale", {}),
    "mixture": ("qwen3_moe dense layer", "scale", {}),
}
GATED = {
    "gated preserve": ("llama", "preserve", GATE),
    "gated adapt": ("llama tied", "merged", GATE),
    "gated neox": ("neox", "scale", GATE),
    "gated adapt, token": ("llama tied", "merged", {"features": "token"}),
    "gated neox, token": ("neox", "scale", {"features": "token"}),
    "gated mixture, token": ("qwen3_moe dense layer", "adapt", {"features": "token"}),
}
MODELS = PLAIN | GATED
LONGROPE = {"gated phi3": ("phi3", "adapt", {"features": "token"})}
LENGTH, NEW_TOKENS = 24, 12
generate = partial(generate_greedily, new_tokens=NEW_TOKENS)


@pytest.fixture
def load(exports):
    def loaded(key, **options):
        name, method, gate = (MODELS | LONGROPE).get(
            key, (key, "scale" if key in ("exaone4", "gemma3") else "adapt", {})
        )
        return AutoModelForCausalLM.from_pretrained(
            exports(name, method, **gate)[0], **options
        ).eval()

    return loaded


def padded_texts(model, lengths):
    """Texts of some lengths, and a batch of them padded to LENGTH on the left with its mask."""
    prompts = [some_tokens(model.config, length, seed=length) for length in lengths]
    padded = torch.stack(
        [torch.nn.functional.pad(prompt, (LENGTH - len(prompt), 0)) for prompt in prompts]
    )
    mask = torch.stack(
        [(torch.arange(LENGTH) >= LENGTH - len(prompt)).long() for prompt in prompts]
    )
    return prompts, padded, mask


@torch.no_grad()
@pytest.mark.parametrize("key", MODELS)
def test_logits_are_those_of_the_trained_model(key, exports, load):
    name, method, gate = MODELS[key]
    decoder, model = exports(name, method, **gate)[1], load(key)
    tokens = some_tokens(decoder.spec, 3, LENGTH, seed=5)
    expected = decoder.logits(tokens)
    assert_near(model(tokens).logits, expected, PARITY)
    if gate:
        fitted, decoder.gate = decoder.gate, None
        assert (decoder.logits(tokens) - expected).abs().max() > 0.1, "the gate closes nothing"
        assert (decoder.logits(tokens, path="base") - expected).abs().max() > 0.1, (
            "the gate opens nothing"
        )
        decoder.gate = fitted


@torch.no_grad()
@pytest.mark.parametrize("key", MODELS)
def test_logits_token_by_token_equal_logits_at_once(key, load):
    """Also after the cache was cropped, as in assisted generation, and beyond the running mean's
    window."""
    model = load(key)
    near = partial(assert_near, bound=PARITY)
    tokens = some_tokens(model.config, 2, 14)
    expected = model(tokens, use_cache=False).logits
    cache, steps = None, []
    for part in tokens.split([5, 1, 1, 4, 3], dim=1):  # also several tokens on top of a cache
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    near(torch.cat(steps, dim=1), expected)
    cache.crop(-6)
    near(model(tokens[:, 8:], past_key_values=cache).logits, expected[:, 8:])
    near(model(tokens, logits_to_keep=2).logits, expected[:, -2:])
    long = some_tokens(model.config, 1, 150)
    first = model(long[:, :140], use_cache=True)
    near(
        model(long[:, 140:], past_key_values=first.past_key_values).logits,
        model(long).logits[:, 140:],
    )


STATIC = {"cache_implementation": "static"}


# Bases by their names: windows and original contexts shorter than the text; layers of two kinds.
@pytest.mark.parametrize(
    ("key", "options"),
    [
        *((key, options) for key in GATED for options in ({}, STATIC)),
        *((key, {"num_beams": 3}) for key in ("gated neox", "gated adapt", "exaone4")),
        ("gemma3", STATIC),
        ("phi3", STATIC),
        ("mistral window", {}),
        ("route", {}),
    ],
)
def test_generation_with_every_cache_equals_generation_without(key, options, load):
    """Beam search reorders the cache."""
    model = load(key)
    tokens = some_tokens(model.config, 2, LENGTH)
    expected = generate(model, tokens, use_cache=False, num_beams=options.get("num_beams", 1))
    assert torch.equal(generate(model, tokens, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("key", "implementation", "cache"),
    [
        *((key, "sdpa", {}) for key in GATED),
        ("gemma3", "sdpa", {}),
        ("exaone4", "eager", STATIC),
        ("phi3", "sdpa", {}),
    ],
)
def test_padding_on_the_left_changes_nothing(key, implementation, cache, load):
    model = load(key, attn_implementation=implementation)
    prompts, padded, mask = padded_texts(model, (5, LENGTH, 8))
    together, direct = (
        generate(model, padded, attention_mask=mask, **cache),
        model(padded, attention_mask=mask).logits,
    )
    for row, prompt in enumerate(prompts):
        assert torch.equal(
            together[row, LENGTH:], generate(model, prompt.unsqueeze(0))[0, len(prompt) :]
        )
        alone = model(prompt.unsqueeze(0)).logits[0]
        assert_near(direct[row, LENGTH - len(prompt) :], alone, PARITY)


@torch.no_grad()
@pytest.mark.parametrize("cache", [{}, STATIC])
@pytest.mark.parametrize("key", ["phi3", "gated phi3"])
def test_each_text_outgrows_a_context_of_longrope_at_its_own_token(key, cache, load):
    """Beside a longer one, that has outgrown it before."""
    model = load(key)
    [context] = model.frequency_contexts
    prompts, padded, mask = padded_texts(model, (5, LENGTH, context - 12, context - 10))
    options = {"new_tokens": 16, "attention_mask": mask}
    together = generate(model, padded, **options, **cache)
    assert torch.equal(together, generate(model, padded, **options, use_cache=False))
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt.unsqueeze(0), new_tokens=16, **cache)
        assert torch.equal(together[row, LENGTH:], alone[0, len(prompt) :])


@torch.no_grad()
def test_a_text_that_cannot_be_read_again_does_not_outgrow_a_context_of_longrope(load):
    model = load("phi3")
    tokens = some_tokens(model.config, 1, 40)
    for mask in (torch.ones_like(tokens), (torch.arange(40) > 2).long().unsqueeze(0)):
        with pytest.raises(ValueError, match="expected all 40 tokens of a text that outgrows 32"):
            generate(model, tokens, attention_mask=mask, prefill_chunk_size=20)
    first = tokens[:, :LENGTH]
    assert torch.equal(generate(model, first, prefill_chunk_size=20), generate(model, first))
    embedded = model.get_input_embeddings()(first)
    with pytest.raises(ValueError, match="give them from its start") as caught:
        model.generate(inputs_embeds=embedded, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("key", GATED)
def test_documents_packed_in_one_row_do_not_see_each_other(key, load):
    """transformers knows them by positions that begin again."""
    model = load(key)
    documents = [some_tokens(model.config, 1, length, seed=length) for length in (9, 14)]
    positions = torch.cat([torch.arange(9), torch.arange(14)]).unsqueeze(0)
    packed = model(torch.cat(documents, dim=1), position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    assert_near(packed, alone, PARITY)


@torch.no_grad()
def test_both_paths_of_the_router_are_taken(load):
    model = load("route")
    tokens = some_tokens(model.config, 4, 24)
    routed, model.output.threshold = model(tokens).logits, -1.1
    preserved = (model(tokens).logits == routed).all(-1)
    assert preserved.any() and not preserved.all()


@torch.no_grad()
@pytest.mark.parametrize("key", ["route", *GATED])
def test_layers_may_be_on_several_devices(key, load):
    model = load(key)
    elsewhere = torch.device(
        "meta"
    )  # it computes nothing, and refuses tensors of another device as a GPU does
    gate = [] if model.token_gate is None else [model.token_gate]
    for module in (*model.layers[1:], model.final_norm, *gate, model.output):
        add_hook_to_module(
            module.to(elsewhere), AlignDevicesHook(execution_device=elsewhere)
        )  # as device_map does
    tokens = some_tokens(model.config, 2, 9)
    out = model(tokens, attention_mask=torch.ones_like(tokens))
    assert out.logits.device == elsewhere and out.logits.shape == (2, 9, model.config.vocab_size)
    model(tokens[:, :1], past_key_values=out.past_key_values)


@torch.no_grad()
@pytest.mark.parametrize("key", GATED)
def test_a_gate_that_never_opens_generates_what_the_base_does(key, exports, load, base):
    name, method, gate = MODELS[key]
    model = load_hf_model(exports(name, method, features=gate["features"], opens="never")[0])
    original, tokens = reference(base(name).path), some_tokens(model.config, 3, 9)
    assert_near(model(tokens).logits, original(tokens).logits, PARITY)
    generated = generate(model, tokens)
    assert torch.equal(generated, generate(original, tokens))
    assert not torch.equal(generated, generate(load(key), tokens))


_SCRIPT = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer("Once upon a time", return_tensors="pt")
tokens = model.generate(prompt.input_ids, attention_mask=prompt.attention_mask, max_new_tokens=20, do_sample=False)
print(tokens[0].tolist())
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
"""


def test_it_generates_without_this_project_and_its_dependencies(exports, tmp_path):
    folder, _ = exports("stories260K", "route stories")
    tokens, text = without_this_project(_SCRIPT, folder, tmp_path).stdout.strip().split("\n", 1)
    here = load_hf_model(folder)
    prompt = torch.tensor([json.loads(tokens)[:-20]])
    assert generate(here, prompt)[0].tolist() == json.loads(tokens)[: prompt.shape[1] + NEW_TOKENS]
    assert text.strip().startswith("Once upon a time")
