"""What exports on hosted bases cache, whatever a type's own cache is."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import StaticCache

from pipeline.extensions.hosted.survey import all_types, survey
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from pipeline.hf.remote_code.scale_hosted_cache import AddedKeys, AddedText
from tests.extensions.hosted.exported import (
    base_alone,
    cache_of,
    exported,
    logits_in_turn,
    spec_of,
    texts,
    tiny_config,
    tiny_decoder,
)

NEAR = {"rtol": 1e-4, "atol": 1e-4}
CHANGES: dict[str, dict[str, Any]] = {
    # Its choice of keys reaches over the whole row, the future too, where the window is shorter.
    "doge": {"keep_window_size": 2048},
}
WITH_A_CACHE = [
    "llama",
    "doge",  # a map of cached values
    "rwkv",  # a list of states
    "xlstm",  # an object of its own
    "mamba2",
    "zaya",
]
IGNORES_ITS_CACHE = "openai-gpt"
RECURRENT = ["mamba", "mamba2", "falcon_mamba"]
"""Types whose `generate` gives the mask of padding with the prompt alone."""


@cache
def export_of(kind: str, opens: str | None = None) -> HostedScaleForCausalLM:
    config = tiny_config(kind)
    for name, value in CHANGES.get(kind, {}).items():
        setattr(config, name, value)
    return exported(tiny_decoder(spec_of(config), own=True), opens)


def tokens_of(model: HostedScaleForCausalLM, rows: int, length: int) -> torch.Tensor:
    return texts(model.config, rows, length)


def options(tokens: int = 6) -> dict[str, Any]:
    return {
        "max_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_scores": True,
        "return_dict_in_generate": True,
    }


def assert_same_scores(found: Any, expected: Any) -> None:
    for of_step, wanted in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(of_step[: len(wanted)], wanted, **NEAR)


@pytest.mark.parametrize("opens", [None, "sometimes"])
@pytest.mark.parametrize("kind", WITH_A_CACHE)
def test_a_cached_text_has_the_logits_of_the_whole(kind, opens):
    model = export_of(kind, opens)
    tokens = tokens_of(model, 1, 20)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        of_base = base_alone(model)(tokens, use_cache=False).logits
    torch.testing.assert_close(logits_in_turn(model, tokens, 12), whole, **NEAR)
    assert (whole - of_base).abs().max() > 0.1


@pytest.mark.parametrize("opens", [None, "sometimes"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_padding_of_the_prompt_stays_padding(kind, opens):
    model = export_of(kind, opens)
    tokens = tokens_of(model, 2, 14)
    text = tokens[:1, 5:]
    padded = tokens.clone()
    padded[0, :5] = 0
    mask = torch.ones_like(padded)
    mask[0, :5] = 0
    found = model.generate(padded, attention_mask=mask, **options())
    expected = model.generate(text, attention_mask=torch.ones_like(text), **options())
    assert_same_scores(found, expected)
    without_mask = model.generate(padded, attention_mask=torch.ones_like(mask), **options())
    assert (without_mask.scores[1][0] - expected.scores[1][0]).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["llama", "zaya", "falcon_h1"])
def test_a_static_cache_generates_the_same(kind):
    """Layers that are attention and recurrence at once are no full attention to the library."""
    model = export_of(kind, "sometimes")
    prompt = tokens_of(model, 2, 9)
    static = {"cache_implementation": "static", "disable_compile": True}
    found = model.generate(prompt, **static, **options())
    assert_same_scores(found, model.generate(prompt, **options()))


@pytest.mark.parametrize("beams", [1, 2])
def test_a_cache_that_the_base_ignores_is_ignored(beams):
    model = export_of(IGNORES_ITS_CACHE)
    prompt = tokens_of(model, 2, 9)
    plain = {**options(), "num_beams": beams}
    found = model.generate(prompt, use_cache=True, **plain).sequences
    assert torch.equal(found, model.generate(prompt, use_cache=False, **plain).sequences)


def test_a_base_that_confuses_texts_of_a_batch_is_refused():
    """RWKV's own code, from the second call on."""
    model = export_of("rwkv")
    with pytest.raises(ValueError, match=r"4 positions for 2 tokens; call with one text at a time"):
        model.generate(tokens_of(model, 2, 9), **options())


def test_a_mask_of_another_length_is_refused():
    model = export_of("llama")
    tokens = tokens_of(model, 1, 12)
    with torch.no_grad():
        first = model(tokens[:, :8], use_cache=True)
        short = torch.ones(1, 6, dtype=torch.long)
        with pytest.raises(ValueError, match=r"expected 12 columns, one for each .* found 6"):
            model(tokens[:, 8:], attention_mask=short, **cache_of(first))


def test_the_base_sees_its_own_layers_of_the_cache_alone():
    """As the library looks at all of them, to size its masks."""
    model = export_of("llama")
    layers = len(model.config.structure["layers"])
    seen: list[int] = []

    def look(_: Any, __: Any, given: dict[str, Any]) -> None:
        seen.append(len(given["past_key_values"].layers))

    tokens = tokens_of(model, 1, 12)
    static = StaticCache(config=model.base.config, max_cache_len=16)
    handle = model.base.model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with torch.no_grad():
            model(tokens[:, :8], past_key_values=static)
            model(tokens[:, 8:], past_key_values=static)
    finally:
        handle.remove()
    assert seen == [layers, layers]
    kinds = [type(layer) for layer in static.layers[layers:]]
    assert kinds.count(AddedKeys) == layers and kinds.count(AddedText) == 1


def test_a_fault_of_the_base_leaves_the_cache_whole(monkeypatch):
    model = export_of("llama")
    tokens = tokens_of(model, 1, 12)
    with torch.no_grad():
        first = model(tokens[:, :8], use_cache=True)
        before = list(first.past_key_values.layers)
        with monkeypatch.context() as patch:
            patch.setattr(model.base.lm_head, "forward", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(tokens[:, 8:9], **cache_of(first))
        assert first.past_key_values.layers == before


@pytest.mark.full
def test_every_hosted_type_caches_as_its_base_does():
    """Where the base's own cached logits are those of the whole text, so are the export's."""
    wrong: dict[str, str] = {}
    tried = 0
    for found in survey(all_types()):
        if found.use != "hosted":
            continue
        tried += 1
        export = export_of.__wrapped__(found.model_type)
        export.double()
        tokens = tokens_of(export, 1, 20)
        alone = base_alone(export)
        try:
            with torch.no_grad():
                expected = alone(tokens, use_cache=False).logits
            off = (logits_in_turn(alone, tokens, 12) - expected).abs().max()
        except Exception:  # noqa: BLE001 - the base itself cannot do so: nothing is owed
            continue
        if off > 1e-3:
            continue
        with torch.no_grad():
            whole = export(tokens, use_cache=False).logits
        of_export = (logits_in_turn(export, tokens, 12) - whole).abs().max()
        if of_export > 1e-3:
            wrong[found.model_type] = f"{float(of_export):.2g}"
    assert tried > 180
    assert wrong == {}
