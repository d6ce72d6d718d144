"""Exports of full fine-tuning with a gate: closed text is the base's to the bit, open text that of
the trained weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, QuantoConfig

from benchmarks.difference_quality import cost_of_base_keys
from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.gate import GateFeatures
from pipeline.conversion.formats import check_format
from pipeline.errors import ConversionError
from pipeline.extensions.full_difference.difference import Packing, difference_export, stored_sizes
from pipeline.extensions.full_difference.verify import LOST, describe_difference, verify_difference
from pipeline.extensions.gate.windows import NO_KIND, Windows
from pipeline.gating.gate import FittedGate
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.packed_difference import GROUP, PackedMatrix, packed
from pipeline.hf.write import write_hf_folder
from tests.bases import reference
from tests.conversion.checkpoints import generate_greedily, without_this_project
from tests.conversion.exports import check_vocabulary_keeps_its_size
from tests.extensions.gate.gates import Opens, random_gate
from tests.files import change_json
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens

# Untied and tied; LayerNorm with biases, renamed output; sliding windows, scaled embedding.
BASES = ["llama", "llama tied", "neox", "gemma2"]
LENGTH = 20
NEW_TOKENS = 10
LAYER = 1
SIXTEEN_BITS = Packing(16)
generate = partial(generate_greedily, new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module", autouse=True)
def trained_together(models):
    models.train([(name, "fft") for name in (*BASES, "phi3")])


def gate_of(model: TrainedModel, features: GateFeatures, opens: Opens) -> FittedGate:
    """A random gate that reads the base's stream; "sometimes" opens for half of some tokens."""
    base = replace(model, untrained=True).loaded(torch.float32, torch.device("cpu"))
    tokens = some_tokens(model.spec, 4, LENGTH)
    return random_gate(base, tokens, features=features, layer=LAYER, opens=opens)


@pytest.fixture(scope="module")
def differences(models, tmp_path_factory) -> Callable[..., Any]:
    """The folder of a difference and its trained model; each is written once."""
    made: dict[tuple[object, ...], tuple[Path, TrainedModel]] = {}

    def make(
        name: str,
        opens: str = "sometimes",
        features: GateFeatures = "token+running_mean",
        packing: Packing = SIXTEEN_BITS,
    ) -> tuple[Path, TrainedModel]:
        key = (name, opens, features, packing)
        if key not in made:
            model = models(name, "fft")
            model = replace(model, gate=gate_of(model, features, opens))
            folder = tmp_path_factory.mktemp("difference")
            export = difference_export(model, torch.float32, packing)
            write_hf_folder(folder, export, model.base.path)
            made[key] = folder, model
        return made[key]

    return make


def opens_of(model: Any, tokens: Tensor) -> Tensor:
    """For which tokens an export's gate opens: bool [B, S]."""
    found: list[Tensor] = []
    handle = model.token_gate.register_forward_hook(lambda *given: found.append(given[2]))
    model(tokens, use_cache=False)
    handle.remove()
    return found[0][..., 0]


@torch.no_grad()
@pytest.mark.parametrize("name", BASES)
def test_closed_tokens_are_the_bases_to_the_bit_and_open_ones_the_trained_models(
    name, differences, base
):
    folder, trained = differences(name)
    model = load_hf_model(folder)
    original = load_hf_model(base(name).path, torch.float32)
    tokens = some_tokens(trained.spec, 3, LENGTH, seed=5)
    opens = opens_of(model, tokens)
    assert opens.any() and not opens.all()
    of_base = original(tokens).logits
    weights = replace(trained, gate=None).loaded(torch.float32, torch.device("cpu"))
    of_trained = weights.logits(tokens)
    assert (of_base - of_trained).abs().max() > 0.05
    for options in ({"use_cache": False}, {}):
        found = model(tokens, **options).logits
        assert torch.equal(found[~opens], of_base[~opens])
        assert_near(found[opens], of_trained[opens], 8e-3)  # 16 bits of a difference
    kept = model(tokens, logits_to_keep=3).logits
    assert_near(kept, found[:, -3:], PARITY)


@torch.no_grad()
@pytest.mark.parametrize("name", BASES)
def test_a_shut_text_is_generated_as_by_the_base(name, differences, base):
    folder, trained = differences(name, opens="never", features="token")
    model = load_hf_model(folder)
    tokens = some_tokens(trained.spec, 3, LENGTH)
    original = reference(base(name).path)
    assert torch.equal(model(tokens).logits, original(tokens).logits)
    assert torch.equal(generate(model, tokens), generate(original, tokens))
    assert not model._made, "nothing opened, and W + D was made"


@torch.no_grad()
@pytest.mark.parametrize("opens", ["never", "sometimes", "always"])
def test_a_batch_outgrows_a_context_of_longrope(opens, differences, base):
    """With its longest text, as in the base."""
    folder, trained = differences("phi3", opens=opens, features="token")
    model = load_hf_model(folder)
    tokens = some_tokens(trained.spec, 2, 26)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    [context] = model.frequency_contexts
    assert 26 < context < 26 + NEW_TOKENS
    found = generate(model, tokens, attention_mask=mask)
    assert torch.equal(found, generate(model, tokens, attention_mask=mask, use_cache=False))
    if opens == "never":
        original = reference(base("phi3").path)
        assert torch.equal(found, generate(original, tokens, attention_mask=mask))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_part_by_part_equal_logits_at_once(name, differences):
    folder, trained = differences(name)
    model = load_hf_model(folder)
    tokens = some_tokens(trained.spec, 2, 16, seed=7)
    expected = model(tokens, use_cache=False).logits
    cache = None
    parts = []
    for part in tokens.split([4, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1], dim=1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert_near(torch.cat(parts, dim=1), expected, PARITY)
    if name != "llama":
        return  # a sliding window is not cropped
    cache.crop(-5)
    found = model(tokens[:, 11:], past_key_values=cache).logits
    assert_near(found, expected[:, 11:], PARITY)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("unpacked", ["once", "by_layer"])
def test_generation_with_cache_padding_and_beams(unpacked, beams, differences):
    folder, trained = differences("llama")
    change_json(folder / "config.json", unpacked=unpacked)
    model = load_hf_model(folder)
    tokens = some_tokens(trained.spec, 3, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    together = generate(model, tokens, attention_mask=mask, num_beams=beams)
    without = generate(model, tokens, attention_mask=mask, num_beams=beams, use_cache=False)
    assert torch.equal(together, without)
    alone = generate(model, tokens[:1, 7:], num_beams=beams)
    assert torch.equal(together[:1, 7:], alone)


@torch.no_grad()
def test_only_what_is_needed_is_read(differences):
    """The base alone while the gate is shut; its lower layers and W + D while it is open."""
    folder, trained = differences("llama", opens="always", features="token")
    model = load_hf_model(folder)
    tokens = some_tokens(trained.spec, 2, LENGTH)
    model.trained()  # a copy of the base, with the hooks that it has
    read: list[str] = []
    lower, last = model.base.model.layers[0], model.base.model.layers[-1]
    lower.register_forward_hook(lambda *_: read.append("lower"))
    last.register_forward_hook(lambda *_: read.append("last"))
    cache = model(tokens[:, :4]).past_key_values
    assert read == ["lower", "last"]
    read.clear()
    for place in range(4, 8):
        model(tokens[:, place : place + 1], past_key_values=cache)
    assert read == 4 * ["lower"], "the base's upper layers ran for open text"
    model.token_gate.threshold = torch.inf
    found = model(tokens[:, 8:9], past_key_values=cache).logits
    of_base = load_hf_model(trained.base.path, torch.float32)(tokens[:, :9]).logits
    assert_near(found[:, 0], of_base[:, -1], PARITY)


@torch.no_grad()
def test_one_open_text_changes_no_other_of_its_batch(differences, base):
    folder, trained = differences("llama", features="token")
    model = load_hf_model(folder)
    original = load_hf_model(base("llama").path, torch.float32)
    tokens = some_tokens(trained.spec, 4, LENGTH)
    scores: list[Tensor] = []
    handle = model.token_gate.register_forward_hook(lambda *given: scores.append(given[2]))
    handle.remove()
    stream = original(tokens, output_hidden_states=True).hidden_states[LAYER]
    by_text = model.token_gate.scores(stream, None, None, None)[..., 0].amax(1)
    ordered = by_text.sort().values
    model.token_gate.threshold = float(ordered[-2:].mean())
    shut = by_text < model.token_gate.threshold
    assert int((~shut).sum()) == 1
    mask = torch.ones_like(tokens)
    cache = None
    cache_of_base = None
    for place in range(LENGTH):
        part = tokens[:, place : place + 1]
        seen = mask[:, : place + 1]
        out = model(part, attention_mask=seen, past_key_values=cache, use_cache=True)
        expected = original(
            part, attention_mask=seen, past_key_values=cache_of_base, use_cache=True
        )
        cache, cache_of_base = out.past_key_values, expected.past_key_values
        assert torch.equal(out.logits[shut], expected.logits[shut])
    assert model._made, "no text opened"


@torch.no_grad()
def test_it_is_saved_loaded_and_unpacked_by_layer(differences, tmp_path):
    folder, trained = differences("llama tied", packing=Packing(4, (3, 5, 8)))
    model = load_hf_model(folder)
    tokens = some_tokens(trained.spec, 2, LENGTH)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "again")
    change_json(tmp_path / "again" / "config.json", unpacked="by_layer")
    again = load_hf_model(tmp_path / "again")
    assert again.config.unpacked == "by_layer"
    assert torch.equal(again(tokens).logits, expected)
    held = dict(again.trained().named_parameters())
    shared = [name for name, parameter in again.base.named_parameters() if parameter is held[name]]
    assert shared == [name for name in held if ".layers." in name], "W + D of a layer stayed"
    # Moved or cast, it is made again.
    assert again.to(torch.float64)(tokens).logits.dtype == torch.float64


@torch.no_grad()
def test_in_16_bits_the_gate_stays_in_fp32(differences, base):
    folder, trained = differences("llama")
    model = load_hf_model(folder, torch.bfloat16)
    original = load_hf_model(base("llama").path, torch.bfloat16)
    tokens = some_tokens(trained.spec, 3, LENGTH, seed=5)
    opens = opens_of(model, tokens)
    assert opens.any() and not opens.all()
    assert {parameter.dtype for parameter in model.base.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in model.token_gate.buffers()} == {torch.float32}
    assert torch.equal(model(tokens).logits[~opens], original(tokens).logits[~opens])


@torch.no_grad()
def test_both_models_attend_as_was_asked_for(differences, tmp_path):
    folder, trained = differences("llama")
    tokens = some_tokens(trained.spec, 2, LENGTH)
    expected = load_hf_model(folder)(tokens).logits
    for asked in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=asked).eval()
        for config in (model.config, model.base.config, model.trained().config):
            assert config._attn_implementation == asked
        assert_near(model(tokens).logits, expected, PARITY)
    with pytest.raises(ValueError, match="flex"):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flex_attention")


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_that_were_guessed_wrongly_are_taken_back(name, differences, base):
    """Several tokens are read at once, and the caches cropped, of which the trained model's may
    hold nothing yet; with sliding windows too."""
    folder, trained = differences(name)
    model = load_hf_model(folder)
    sometimes = model.token_gate.threshold
    assistant = load_hf_model(base(name).path, torch.float32)
    tokens = some_tokens(trained.spec, 1, 6).repeat(1, 3)
    for threshold in (torch.inf, sometimes, -torch.inf):
        model.token_gate.threshold = threshold
        expected = generate(model, tokens)
        for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
            assert torch.equal(generate(model, tokens, **how), expected), (threshold, *how)


@torch.no_grad()
@pytest.mark.parametrize("opens_at_first", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_is_cropped_that_the_trained_model_has_not_filled(
    name, opens_at_first, differences
):
    """Its window, shorter than the text, holds nothing to take back of tokens that it has not
    read."""
    folder, trained = differences(name, features="token")
    model = load_hf_model(folder)
    tokens = some_tokens(trained.spec, 1, LENGTH)
    cache = DynamicCache(config=model.config.text_config)
    cache.activate_past_recording()
    model.token_gate.threshold = -torch.inf if opens_at_first else torch.inf
    model(tokens[:, :12], past_key_values=cache)
    cache.crop(0)
    model.token_gate.threshold = torch.inf
    for first, last, removed in ((12, 16, 0), (3, 6, 3)):
        model(tokens[:, first:last], past_key_values=cache)
        cache.crop(-removed)
    model.token_gate.threshold = -torch.inf
    found = model(tokens[:, 16:], past_key_values=cache).logits
    assert_near(found, model(tokens, use_cache=False).logits[:, 16:], PARITY)


_SCRIPT = """
from transformers import AutoModelForCausalLM
import torch
tokens = torch.arange(3, 13).view(1, -1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, unpacked="by_layer")
print(model.config.unpacked, model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=10, eos_token_id=None)[0].tolist())
"""


def test_it_runs_without_this_project_and_its_dependencies(differences, tmp_path):
    folder, _ = differences("llama", packing=Packing(4))
    unpacked, tokens = without_this_project(_SCRIPT, folder, tmp_path).stdout.split(maxsplit=1)
    here = generate(load_hf_model(folder), torch.arange(3, 13).view(1, -1))
    assert unpacked == "by_layer" and json.loads(tokens) == here[0].tolist()


def test_the_keys_of_the_bases_beginning_are_not_those_of_the_trained_model(differences):
    folder, trained = differences("llama")
    model = load_hf_model(folder)
    tokens = some_tokens(trained.spec, 6, LENGTH)
    text = torch.ones_like(tokens, dtype=torch.bool)
    positions = torch.arange(LENGTH).expand_as(tokens)
    documents = torch.zeros_like(tokens)
    kinds = torch.full_like(tokens, NO_KIND)
    windows = Windows(tokens, tokens.roll(-1, 1), positions, documents, text, ~text, text, kinds)
    found = cost_of_base_keys(model, windows)
    assert 0 < found["tokens"] < tokens.numel() and 0 < found["closed_again"] < 1
    assert abs(found["keys_of_the_base"] / found["read_anew"] - 1) > 1e-4


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_it_is_verified(bits, differences):
    folder, model = differences("llama", packing=Packing(bits))
    probe = {"text": list(some_tokens(model.spec, 2, LENGTH))}
    report = verify_difference(model, folder, probe, torch.float32)
    assert report.closed_tokens + report.open_tokens == 2 * LENGTH
    assert 0 < report.closed_tokens < 2 * LENGTH
    said = f"closed tokens have the base's logits to the bit ({report.closed_tokens} tokens)"
    assert said in describe_difference(report)
    assert 0 < report.kl < LOST[bits] * report.kl_from_base
    assert report.lost == pytest.approx(report.kl / report.kl_from_base)


def test_where_every_token_is_open_nothing_is_said_of_closed_text(models, tmp_path):
    model = models("llama", "fft")
    model = replace(model, gate=gate_of(model, "token", "always"))
    export = difference_export(model, torch.float32, Packing(16))
    write_hf_folder(tmp_path, export, model.base.path)
    probe = {"text": list(some_tokens(model.spec, 2, LENGTH))}
    report = verify_difference(model, tmp_path, probe, torch.float32)
    assert report.closed_tokens == 0 and report.open_tokens == 2 * LENGTH
    assert "no closed token was compared with the base" in describe_difference(report)


def test_the_vocabulary_keeps_its_size(differences):
    check_vocabulary_keeps_its_size(load_hf_model(differences("llama")[0]), "of its base")


def test_a_wrong_difference_is_not_kept(differences, tmp_path, models):
    model = models("llama", "fft")
    model = replace(model, gate=gate_of(model, "token", "sometimes"))
    export = difference_export(replace(model, untrained=True), torch.float32, Packing())
    write_hf_folder(tmp_path, export, model.base.path)
    probe = {"text": list(some_tokens(model.spec, 2, LENGTH))}
    with pytest.raises(ConversionError, match=r"nats a token, expected at most .* --bits"):
        verify_difference(model, tmp_path, probe, torch.float32)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("columns", [96, 50])
def test_a_packed_matrix(bits, columns):
    difference = 1e-5 * torch.randn(24, columns, generator=torch.Generator().manual_seed(1))
    difference[3] = 0
    module = PackedMatrix(24, columns, bits)
    codes, scales = packed(difference, bits)
    assert (codes.shape, codes.dtype) == (module.codes.shape, module.codes.dtype)
    module.codes = codes
    if scales is not None:
        assert (scales.shape, scales.dtype) == (module.scales.shape, module.scales.dtype)
        module.scales = scales
    found = module.unpacked()
    error = (found - difference).norm() / difference.norm()
    assert error < {4: 0.1, 8: 0.01, 16: 0.003}[bits]
    assert not found[3].any()


def test_a_rank_takes_its_part_of_codes_and_scales():
    """Rows, and columns in whole groups, are packed alike whatever else there is."""
    difference = torch.randn(12, 4 * GROUP, generator=torch.Generator().manual_seed(1))
    codes, scales = packed(difference, 4)
    half = 2 * GROUP
    assert all(map(torch.equal, packed(difference[4:8], 4), (codes[4:8], scales[4:8])))
    right = packed(difference[:, half:], 4)
    assert all(map(torch.equal, right, (codes[:, half // 2 :], scales[:, 2:])))


def test_searched_scales_are_better_than_those_that_reach_the_largest_element():
    difference = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    module = PackedMatrix(64, 96, 4)
    module.codes, module.scales = packed(difference, 4)
    groups = difference.unflatten(1, (-1, GROUP))
    reaching = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / reaching).round() * reaching).flatten(1)
    assert (module.unpacked() - difference).norm() < 0.95 * (plain - difference).norm()


def test_rare_tokens_share_a_row(models):
    model = models("llama", "fft")
    model = replace(model, gate=gate_of(model, "token", "never"))
    own = (3, 5, 8)
    export = difference_export(model, torch.float32, Packing(4, own))
    tensors = {tensor.name: tensor for tensor in export.tensors}
    stored = "difference.model/embed_tokens/weight"
    codes = tensors[f"{stored}.codes"].make().view(torch.bfloat16).float()
    rows = codes[tensors[f"{stored}.row_of_token"].make().long()]
    name = "embedding.base.weight"
    change = model.read(name).float() - model.base.read(name).float()
    assert_near(rows[list(own)], change[list(own)], 4e-3)
    others = [token for token in range(len(change)) if token not in own]
    shared = change[others].mean(0).expand(len(others), -1)
    assert_near(rows[others], shared, 4e-3)
    sizes = stored_sizes(export)
    assert sizes["own_rows"] == 4 and sizes["difference_bytes"] < 2 * sizes["base_parameters"]


def test_a_base_in_fewer_bits_is_refused_as_it_is_loaded(differences):
    folder, _ = differences("llama")
    for options in ({}, {"output_loading_info": True}):
        with pytest.raises(
            ValueError, match=r"expected none, .* found QuantoConfig; load"
        ) as caught:
            AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=QuantoConfig(weights="int8"), **options
            )
        assert "\n" not in str(caught.value)


def test_what_it_refuses(models, differences):
    model = models("llama", "fft")
    with pytest.raises(ConversionError, match="this model has no gate"):
        check_format(model, "difference")
    gated = replace(model, gate=gate_of(model, "token", "never"))
    assert check_format(gated, "auto").name == "difference"
    with pytest.raises(ConversionError, match="merged: a gate decides"):
        check_format(gated, "merged")
    exported = load_hf_model(differences("llama")[0])
    tokens = some_tokens(model.spec, 1, 4)
    with pytest.raises(ValueError, match="give input_ids"):
        exported(inputs_embeds=torch.zeros(1, 4, 32))
    with pytest.raises(ValueError, match="only logits are given"):
        exported(tokens, output_hidden_states=True)
    with pytest.raises(ValueError, match="continuous batching cannot run"):
        exported.generate_batch([[1, 2]])
    for name in ("llama", "gemma2"):
        asked = load_hf_model(differences(name)[0])
        with pytest.raises(ValueError, match="expected a DynamicCache"):
            generate(asked, tokens, cache_implementation="static")
    masks = {"full_attention": None, "sliding_attention": None}
    with pytest.raises(ValueError, match="expected the padding of each text"):
        exported(tokens, attention_mask=masks)
    with torch.no_grad():
        of_base = exported.base(tokens, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="past_key_values: filled by another model"):
            exported(tokens, past_key_values=of_base)
