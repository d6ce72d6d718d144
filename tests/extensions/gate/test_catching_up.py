"""Generation with a gate: a text pays for the expansion from where the gate first opens, and gets
the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from pipeline.hf.remote_code import scale_caches, scale_from_open_on
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.scale_caches import GateCache
from pipeline.scale_math import WINDOW
from tests.conversion.checkpoints import generate_greedily, scale_config
from tests.tolerances import PARITY, assert_near

NEW_TOKENS = 12
BIASES = [-30.0, -2.1, -1.8, -1.0]
BOTH = ["attention", "ffn"]
OWN = {"own_rows": 9, "own_gains": True, "own_rank": 3}
NOT_WIDER = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "expansion_hidden_size": 0,
    "expansion_intermediate_size": 0,
    "expansion_num_attention_heads": 0,
    "expansion_num_key_value_heads": 0,
}
MODELS = {
    "preserve": {"gate_layer": 4, "l_fp": 4},
    "adapt": {"gate_layer": 2, "l_fp": 2, "collaborative_modules": BOTH},
    "running mean": {
        "gate_layer": 2,
        "l_fp": 2,
        "collaborative_modules": BOTH,
        "gate_features": "token+running_mean",
    },
    "sliding": {
        "gate_layer": 4,
        "l_fp": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "new pieces": {"gate_layer": 4, "l_fp": 4, "base_vocab_size": 500},
    "open ids": {"gate_layer": 2, "l_fp": 2, "collaborative_modules": BOTH, "gate_open_ids": True},
    "open weights": {"gate_layer": 1, "l_fp": 4, "own_first_layer": 2} | OWN,
    "open weights, adapt": {"gate_layer": 2, "l_fp": 2, "collaborative_modules": BOTH}
    | {"own_first_layer": 2, "gate_features": "token+running_mean"}
    | OWN,
    "open weights, adapt from 0": {"gate_layer": 2, "l_fp": 0, "collaborative_modules": BOTH}
    | {"own_first_layer": 0}
    | OWN,
    "adapt, gate after the last layer": {"gate_layer": 4, "l_fp": 1, "collaborative_modules": BOTH},
    "lora": {"gate_layer": 1, "l_fp": 4, "own_first_layer": 2} | OWN | NOT_WIDER,
    "lora from 0": {"gate_layer": 2, "l_fp": 4, "own_first_layer": 0, "own_scale": 1.5}
    | {"gate_features": "token+running_mean", "own_maps": ["key", "up"]}
    | OWN
    | NOT_WIDER,
}


def gated(name: str, bias: float) -> ScaleForCausalLM:
    """A model with random weights, whose gate opens more often with a larger `bias`."""
    model = ScaleForCausalLM(scale_config(sliding_window=6, gate_bias=bias, **MODELS[name])).eval()
    random = torch.Generator().manual_seed(0)
    for parameter in (*model.parameters(), model.token_gate.mean, model.token_gate.weight):
        torch.nn.init.normal_(parameter, std=0.1, generator=random)
    if model.token_gate.is_open_id is not None:
        model.token_gate.is_open_id[5::40] = True
    if model.own_input is not None:
        table = torch.randint(0, 9, (512,), generator=random)
        for module in (model.own_input, model.output):
            module.row_of_token.copy_(table)
    return model


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Four prompts, two of them padded on the left."""
    tokens = torch.randint(0, 500, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[2, :5] = 0
    return tokens, mask


def always_whole():
    return patch.object(scale_from_open_on, "_can_read_again", lambda *_: False)


@contextmanager
def expanded_tokens(model: ScaleForCausalLM) -> Iterator[list[tuple[int, int]]]:
    """Of how many sequences and tokens each pass computed the expansion, or adapters."""
    seen: list[tuple[int, int]] = []
    block = model.layers[0].attention.query.expansion_to_expansion
    if block is None:
        block = model.layers[-1].attention.key.adapter
    handle = block.register_forward_hook(
        lambda _, inputs, __: seen.append(tuple(inputs[0].shape[:-1]))
    )
    yield seen
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("name", MODELS)
def test_generation_is_that_of_the_full_computation(name, bias):
    """Gates open in the prompt, while generating, or never."""
    model, (tokens, mask) = gated(name, bias), prompts()
    for options in ({}, {"num_beams": 3}, {"use_cache": False}):
        with always_whole():
            whole = generate_greedily(
                model, tokens, attention_mask=mask, new_tokens=NEW_TOKENS, **options
            )
        with expanded_tokens(model) as computed:
            found = generate_greedily(
                model, tokens, attention_mask=mask, new_tokens=NEW_TOKENS, **options
            )
        assert torch.equal(found, whole)
        if name == "sliding" and not options:
            opened = computed[0][1] > tokens.shape[1] if computed else None
            assert opened == {-30.0: None, -2.1: True, -1.0: False}.get(bias, opened)
    with always_whole():
        expected = model(tokens, attention_mask=mask).logits
    real = mask.bool()
    for cache in (None, DynamicCache()):
        found = model(tokens, attention_mask=mask, past_key_values=cache).logits
        assert_near(found[real], expected[real], PARITY)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_guessed_ahead_while_the_gate_opens(name):
    for bias in BIASES:
        model, tokens = gated(name, bias), prompts()[0][1:2].repeat(1, 2)
        found = generate_greedily(model, tokens, new_tokens=NEW_TOKENS, prompt_lookup_num_tokens=3)
        assert torch.equal(found, generate_greedily(model, tokens, new_tokens=NEW_TOKENS))


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "bias"),
    [*((name, -30.0) for name in MODELS), ("adapt", 30.0), ("lora", 30.0)],
)
def test_a_shut_text_computes_no_expansion_and_an_open_one_computes_it_once(name, bias):
    model, (tokens, mask) = gated(name, bias), prompts()
    once = [tuple(tokens.shape), *[(len(tokens), 1)] * (NEW_TOKENS - 1)]
    with expanded_tokens(model) as computed:
        found = generate_greedily(model, tokens, attention_mask=mask, new_tokens=NEW_TOKENS)
    assert computed == ([] if bias < 0 else once)
    with always_whole(), expanded_tokens(model) as computed:
        assert torch.equal(
            found, generate_greedily(model, tokens, attention_mask=mask, new_tokens=NEW_TOKENS)
        )
    assert computed == once


@torch.no_grad()
def test_only_texts_whose_gate_opens_are_computed_again_and_the_others_stay_the_bases():
    """The second text has a new piece in the prompt, the third one follows it."""
    model, (tokens, mask) = gated("new pieces", -30.0), prompts()
    opening, mask = F.pad(tokens, (0, 1), value=7), F.pad(mask, (0, 1), value=1)
    opening[1, -2] = opening[2, -1] = 500
    closed, prompt, last = [0, 3], opening[:, :-1], opening[:, -1:]
    with expanded_tokens(model) as computed:
        cache = model(prompt, attention_mask=mask[:, :-1]).past_key_values
        found = model(last, attention_mask=mask, past_key_values=cache).logits
        assert computed == [(1, 9), (4, 1), (1, 10)]
        model(opening, attention_mask=mask, use_cache=False)
        assert computed[3:] == [(2, 10)]
        shut = model(tokens, attention_mask=mask[:, :-1]).past_key_values
        expected = model(torch.full_like(last, 7), attention_mask=mask, past_key_values=shut).logits
        assert len(computed) == 4 and torch.equal(found[closed], expected[closed])
    with always_whole():
        expected = model(opening, attention_mask=mask).logits[:, -1:]
    assert_near(found, expected, PARITY)


@torch.no_grad()
def test_texts_with_ids_that_are_open_are_computed_once():
    """A prompt that opens by its ids does not run with the base alone first."""
    model, (tokens, mask) = gated("open ids", -30.0), prompts()
    tokens[:, -1] = 5
    with expanded_tokens(model) as computed:
        found = generate_greedily(model, tokens, attention_mask=mask, new_tokens=NEW_TOKENS)
    assert computed == [tuple(tokens.shape), *[(len(tokens), 1)] * (NEW_TOKENS - 1)]
    with always_whole():
        whole = generate_greedily(model, tokens, attention_mask=mask, new_tokens=NEW_TOKENS)
    assert torch.equal(found, whole)

    # One text of the batch has such an id as padding alone: it stays the base's.
    tokens[0, -1] = 6
    tokens[0, 0] = 5
    with expanded_tokens(model) as computed:
        model(tokens, attention_mask=mask)
    assert computed == [(3, 9)]


def test_with_gradients_or_hidden_states_everything_is_computed():
    model, (tokens, _) = gated("adapt", -30.0), prompts()
    with expanded_tokens(model) as computed:
        model(tokens)
        with torch.no_grad():
            model(tokens, output_hidden_states=True)
            model.generate(tokens, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    assert computed == [tuple(tokens.shape)] * 3 + [(len(tokens), 1)]


@torch.no_grad()
@pytest.mark.parametrize("name", ["adapt", "lora"])
def test_beside_a_server_s_cache_everything_is_computed_once(name):
    """Continuous batching over paged FlashAttention gives no mask, and its cache as an option."""
    model, (tokens, _) = gated(name, -30.0), prompts()
    with expanded_tokens(model) as computed:
        model(tokens[:1], use_cache=False, cache=object())
    assert computed == [(1, tokens.shape[1])]


@torch.no_grad()
def test_a_cache_of_the_base_alone_is_not_read_with_the_expansion():
    model, (tokens, _) = gated("adapt", -30.0), prompts()
    cache = model(tokens[:, :5]).past_key_values
    with pytest.raises(ValueError, match="give the text from its start"):
        model(tokens[:, 5:], past_key_values=cache, output_hidden_states=True)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("name", ["preserve", "adapt", "open weights, adapt from 0", "lora from 0"])
def test_a_cache_that_was_filled_without_gradients_is_continued_with_them(name, bias):
    """Also where it is of the base alone: then the text is read again with the expansion."""
    model, (tokens, mask) = gated(name, bias), prompts()
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    read = 6
    with torch.no_grad():
        cache = model(tokens[:, :read], attention_mask=mask[:, :read]).past_key_values
    out = model(tokens[:, read:], attention_mask=mask, past_key_values=cache)
    assert out.logits.requires_grad
    assert_near(out.logits, whole[:, read:], PARITY)
    out.logits.logsumexp(-1).sum().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 0


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", ["preserve", "adapt", "open weights, adapt from 0", "lora from 0"])
def test_a_trace_decides_for_each_text_anew(name, with_gradients):
    """It is made of a text for which the gate stays shut, and read with one for which it opens."""
    model = gated(name, -1.0)
    model.config.use_cache = False
    model.config.return_dict = False
    shut, opened = (torch.full((1, 9), token) for token in tokens_by_score(model))
    with torch.set_grad_enabled(with_gradients):
        traced = torch.jit.trace(model, (shut,), check_trace=False)
        for tokens in (shut, opened):
            assert_near(traced(tokens)[0], model(tokens)[0], PARITY)


def tokens_by_score(model: ScaleForCausalLM) -> tuple[int, int]:
    """Two tokens in texts of which alone the gate never opens, and opens most often."""
    opens: list[torch.Tensor] = []
    handle = model.token_gate.register_forward_hook(lambda _, __, found: opens.append(found))
    with torch.no_grad():
        model(torch.arange(500)[:, None].expand(-1, 9), use_cache=False)
    handle.remove()
    count = opens[0].flatten(1).sum(1)
    assert count.min() == 0 < count.max()
    return int(count.argmin()), int(count.argmax())


def test_weights_of_attention_are_refused_and_not_left_out():
    model, (tokens, mask) = gated("adapt", -1.0), prompts()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"output_attentions: .* leave it out"):
        model(tokens, attention_mask=mask, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"output_attentions: .* leave it out"):
        model(tokens, attention_mask=mask)


@torch.no_grad()
def test_of_a_long_text_only_what_the_running_mean_reads_is_kept():
    """Its decisions are those of a cache that keeps everything, to the bit; so are those after
    tokens are cropped."""
    model, random = gated("running mean", 0.0), torch.Generator().manual_seed(2)
    stream = torch.randn(2, 700, model.config.hidden_size, generator=random)

    def scores(cache: GateCache, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [model.token_gate.scores(part, None, None, cache) for part in parts], dim=1
        )

    parts = stream.tensor_split([300, *range(301, 700)], dim=1)
    with patch.object(scale_caches, "WINDOW", 10**6):
        expected = scores(GateCache(), parts)
    cache = GateCache()
    assert torch.equal(scores(cache, parts), expected)
    assert cache.keys.shape[2] == cache.values.shape[2] == 2 * WINDOW - 1
    cache.crop(-WINDOW)
    assert torch.equal(scores(cache, parts[-WINDOW:]), expected[:, -WINDOW:])
    with pytest.raises(RuntimeError, match="cropped by 128 tokens"):
        cache.crop(-WINDOW - 1)
