"""Exports whose open tokens have weights of their own: the trained model's where open, the base's
where closed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoConfig, ContinuousBatchingConfig, GenerationConfig

from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.conversion.verify import verify
from pipeline.errors import ConversionError
from pipeline.expansion_folder import open_expansion
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code import scale_from_open_on
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.methods.scale import Scale
from pipeline.model.from_hf import RESIDUAL_KEY, open_base
from pipeline.open_tokens import ALL_OPEN
from tests.bases import reference
from tests.conversion.checkpoints import (
    generate_greedily,
    save_many,
    trained,
    training_decoder,
)
from tests.conversion.exports import MORE_METHODS, assert_exported, choose_export, exported
from tests.distributed import run_ranks
from tests.extensions.gate.gates import random_gate
from tests.tolerances import PARITY, assert_near, rounding
from tests.widened import some_tokens, unwidened

LENGTH, NEW_TOKENS = 20, 10
# Llama; LayerNorm with biases and parallel residuals; norms of heads; tied and soft-capped, with gains as offsets.
MODELS = [
    ("llama", "own adapt"),
    ("neox", "own preserve"),
    ("neox", "own adapt"),
    ("qwen3", "own preserve"),
    ("gemma2", "own adapt"),
    ("qwen3_moe dense layer", "own adapt"),
    # From the embedding on, with two passes below the gate; LoRA, whose exports are no wider.
    ("llama", "own adapt from 0"),
    ("neox", "own lora"),
    ("gemma2", "own lora"),
    ("qwen3", "own lora from 1"),
    ("llama tied", "lora"),
    ("glm4_moe", "own lora"),
    ("qwen2_moe", "own lora"),
]
GENERATED = [*MODELS[:2], ("llama", "own adapt from 0"), ("neox", "own lora")]
# Tied; fused maps; norms after attention and of heads; LayerNorm; a scaled embedding; experts.
MERGED = [
    ("llama tied", "own merged"),
    ("neox", "own lora"),
    ("gemma2", "own lora"),
    ("qwen3", "own lora from 1"),
    *(
        pytest.param(*pair, marks=pytest.mark.full)
        for pair in [
            ("phi3", "own merged"),
            ("smollm3", "own preserve merged"),
            ("exaone4", "own matrices merged"),
            ("glm4_moe", "own lora"),
            ("qwen2_moe", "own lora"),
        ]
    ),
]
generate = partial(generate_greedily, new_tokens=NEW_TOKENS)
OWN_PARTS = (".own.", ".adapter.", "own_rows", "own_input.rows")


@pytest.fixture(scope="module", autouse=True)
def trained_together(models):
    models.train([*MODELS, ("llama tied", "own merged")])


def without_own_weights(model):
    """The same model, whose open weights are zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in OWN_PARTS):
                assert parameter.abs().max() > 0, f"{name} has no effect"
                parameter.zero_()
    return model


@torch.no_grad()
@pytest.mark.parametrize(("name", "method"), MODELS)
def test_logits_are_those_of_the_trained_model(name, method, exports):
    folder, decoder = exports(name, method, features="token+running_mean")
    tokens = some_tokens(decoder.spec, 3, LENGTH, seed=5)
    expected = decoder.logits(tokens)
    of_base = decoder.logits(tokens, path="base")
    opens = decoder.gate.is_open(decoder.base_stream(tokens, layer=decoder.gate.layer))
    assert opens.any() and not opens.all()
    model = load_hf_model(folder)
    found = model(tokens).logits
    assert_near(found, expected, PARITY)
    assert_near(model(tokens, use_cache=False).logits, expected, PARITY)
    assert_near(model(tokens, logits_to_keep=3).logits, expected[:, -3:], PARITY)
    assert_near(model(tokens, output_hidden_states=True).logits, expected, PARITY)
    before = opens.cumsum(1) == 0
    # In a mixture, closed tokens share their experts' products with open ones, which may round them
    # otherwise.
    bound = PARITY if "_moe" in name else 0.0
    if before.any():
        assert_near(expected[before], of_base[before], bound)
    plain = without_own_weights(model)(tokens).logits
    if before.any():
        assert_near(plain[before], found[before], bound)
    assert ((plain - found).abs().amax(-1)[opens] > 1e-3).all(), "open tokens do not change"


@torch.no_grad()
@pytest.mark.parametrize(("name", "method"), MODELS)
def test_a_shut_text_is_the_bases_whatever_the_own_weights_are(name, method, exports, base):
    folder, _ = exports(name, method, features="token", opens="never")
    model, original = load_hf_model(folder), reference(base(name).path)
    tokens = some_tokens(model.config, 3, LENGTH)
    logits = model(tokens).logits
    assert_near(logits, original(tokens).logits, PARITY)
    generated = generate(model, tokens)
    assert torch.equal(generated, generate(original, tokens))
    with patch.object(scale_from_open_on, "_can_read_again", lambda *_: False):
        whole = model(tokens).logits
        plain = without_own_weights(model)(tokens).logits
    assert torch.equal(whole, plain) and torch.equal(whole, logits)


@torch.no_grad()
@pytest.mark.parametrize(("name", "method"), GENERATED)
def test_logits_token_by_token_equal_logits_at_once(name, method, exports):
    model = load_hf_model(exports(name, method, features="token+running_mean")[0])
    tokens = some_tokens(model.config, 2, 14)
    expected = model(tokens, use_cache=False).logits
    cache, steps = None, []
    for part in tokens.split([5, 1, 1, 4, 3], dim=1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert_near(torch.cat(steps, dim=1), expected, PARITY)
    cache.crop(-6)
    found = model(tokens[:, 8:], past_key_values=cache).logits
    assert_near(found, expected[:, 8:], PARITY)


@pytest.mark.full
@torch.no_grad()
@pytest.mark.parametrize(("name", "method"), GENERATED)
def test_steps_without_a_mask_give_the_same_bits(name, method, exports, monkeypatch):
    """No mask is applied where all tokens of a step are open, or all closed."""
    model = load_hf_model(exports(name, method, features="token+running_mean")[0])
    tokens = some_tokens(model.config, 2, 14)
    behind_gate = ScaleForCausalLM._behind_gate
    masks = []

    def logits(*, may_skip_masks):
        def choose(model, paths, opens, may_wait):
            found = behind_gate(model, paths, opens, may_wait and may_skip_masks)
            masks.append(found[-1].open_tokens)
            return found

        monkeypatch.setattr(ScaleForCausalLM, "_behind_gate", choose)
        cache = None
        steps = []
        for part in tokens.split([5, *[1] * 9], dim=1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
        return torch.cat(steps, dim=1)

    found = logits(may_skip_masks=True)
    assert any(mask == ALL_OPEN for mask in masks)
    assert torch.equal(found, logits(may_skip_masks=False))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
@pytest.mark.parametrize(("name", "method"), GENERATED)
def test_generation_with_caches_padding_and_beams(name, method, options, exports):
    model = load_hf_model(exports(name, method, features="token+running_mean")[0])
    prompts = [some_tokens(model.config, length, seed=length) for length in (5, LENGTH, 8)]
    padded = torch.stack(
        [torch.nn.functional.pad(prompt, (LENGTH - len(prompt), 0)) for prompt in prompts]
    )
    mask = torch.stack(
        [(torch.arange(LENGTH) >= LENGTH - len(prompt)).long() for prompt in prompts]
    )
    together = generate(model, padded, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = generate(
            model, prompt.unsqueeze(0), use_cache=False, num_beams=options.get("num_beams", 1)
        )
        assert torch.equal(together[row, LENGTH:], alone[0, len(prompt) :])


@torch.no_grad()
def test_documents_packed_in_one_row_do_not_see_each_other(exports):
    model = load_hf_model(exports("llama", "own adapt", features="token+running_mean")[0])
    documents = [some_tokens(model.config, 1, length, seed=length) for length in (9, 14)]
    positions = torch.cat([torch.arange(9), torch.arange(14)]).unsqueeze(0)
    packed = model(torch.cat(documents, dim=1), position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    assert_near(packed, alone, PARITY)


@torch.no_grad()
def test_a_base_that_was_widened_before(models, tmp_path):
    """A merged export, whose norms count added channels less."""
    first = models("llama tied", "merged")
    widened_base = exported(first, "merged", tmp_path / "base")
    run_ranks(save_many, 1, [(widened_base, MORE_METHODS["own adapt"], tmp_path / "run")])
    model = trained(widened_base, tmp_path / "run")
    assert model.spec.residual is not None
    decoder = training_decoder(model)
    tokens = some_tokens(model.spec, 2, LENGTH)
    decoder.gate = random_gate(decoder, tokens)
    folder = exported(replace(model, gate=decoder.gate), "scale", tmp_path / "hf")
    found = load_hf_model(folder)(tokens).logits
    assert_near(found, decoder.logits(tokens), PARITY)
    decoder.gate = replace(decoder.gate, threshold=1e30)
    assert torch.equal(decoder.logits(tokens), decoder.logits(tokens, path="base"))


@torch.no_grad()
def test_sixteen_bits_keep_the_table_of_rows(models, tmp_path):
    model = models("llama", "own adapt")
    decoder = training_decoder(model)
    tokens = some_tokens(decoder.spec, 2, 16)
    decoder.gate = random_gate(decoder, tokens, opens="always")
    folder = exported(replace(model, gate=decoder.gate), "scale", tmp_path / "hf", torch.bfloat16)
    found = load_hf_model(folder, torch.float32)
    table = found.own_input.row_of_token
    assert not table.is_floating_point() and torch.equal(table, found.output.row_of_token)
    assert table.max() == len(decoder.plan.own.tokens) == len(found.output.own_rows) - 1
    assert_near(found(tokens).logits, decoder.logits(tokens), rounding(48, 1, torch.bfloat16))


def test_a_saved_copy_is_the_same_model(exports, tmp_path):
    model = load_hf_model(exports("llama", "own adapt", features="token")[0])
    model.save_pretrained(tmp_path / "copy")
    again = load_hf_model(tmp_path / "copy")
    tokens = some_tokens(model.config, 2, LENGTH)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)


@torch.no_grad()
def test_layers_may_be_on_several_devices(exports):
    model = load_hf_model(exports("llama", "own preserve", features="token")[0])
    elsewhere = torch.device("meta")
    for module in (*model.layers[1:], model.own_input, model.final_norm, model.output):
        add_hook_to_module(module.to(elsewhere), AlignDevicesHook(execution_device=elsewhere))
    out = model(some_tokens(model.config, 2, 9))
    assert out.logits.device == elsewhere and out.logits.shape[:2] == (2, 9)


def test_a_model_that_is_not_loaded_has_initial_values(exports):
    config = AutoConfig.from_pretrained(exports("gemma2", "own adapt", features="token")[0])
    torch.use_deterministic_algorithms(True)  # memory that is not written to is NaN
    try:
        model = ScaleForCausalLM(config)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not any(gain.any() for name, gain in model.named_parameters() if ".own." in name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, exports):
    """Where another library trains the export further."""
    model = load_hf_model(exports("llama", "own adapt", features="token")[0]).train()
    tokens = some_tokens(model.config, 2, LENGTH)

    def gradients():
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
        return {key: parameter.grad.clone() for key, parameter in trained.items()}

    expected = gradients()
    assert expected["output.own_rows"].abs().max() > 0
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients()
    for key, gradient in expected.items():
        assert_near(found[key], gradient, PARITY, key)


def test_continuous_batching_generates_the_same(exports):
    model = load_hf_model(exports("llama", "own adapt", features="token")[0])
    prompts = [some_tokens(model.config, length, seed=length).tolist() for length in (5, 20, 11)]
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    paged = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    found = model.generate_batch(prompts, settings, paged)
    assert len(found) == len(prompts)
    for prompt, answer in zip(prompts, found.values(), strict=True):
        alone = generate(model, torch.tensor([prompt]))[0, len(prompt) :].tolist()
        assert answer.generated_tokens == alone


def test_embeddings_are_refused_by_name_and_the_backbones_head_gives_the_logits(exports):
    model = load_hf_model(exports("llama", "own adapt", features="token")[0])
    tokens = some_tokens(model.config, 1, 4)
    with pytest.raises(ValueError, match="give input_ids: tokens that the gate opens have rows"):
        model(inputs_embeds=model.embedding(tokens))
    hidden = model.base_model(tokens).last_hidden_state
    logits = hidden @ model.get_output_embeddings().weight.T
    assert_near(logits, model(tokens).logits, PARITY)


@pytest.mark.parametrize(
    ("format", "gated", "message"),
    [
        ("merged", True, "enter before layer 1, where an ordinary model reads no embedding"),
        ("merged", False, "enter before layer 1, where an ordinary model reads no embedding"),
        ("scale", False, "tokens read them where a gate opens, and this model has no gate"),
        ("auto", False, "tokens read them where a gate opens, and this model has no gate"),
    ],
)
def test_what_a_format_cannot_express_is_refused(format, gated, message, models):
    model = models("qwen3", "own preserve")
    if gated:
        decoder = training_decoder(model)
        model = replace(model, gate=random_gate(decoder, some_tokens(model.spec, 2, 8)))
    with pytest.raises(ConversionError, match=message) as refused:
        choose_export(model, format, torch.float32)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "method"), MERGED)
def test_without_a_gate_they_are_merged(name, method, models, tmp_path):
    """Every token of an ordinary model reads them, as in training."""
    model = models(name, method)
    folder = exported(model, "auto", tmp_path / "hf")
    assert_exported(model, folder)
    assert not (folder / "modeling_scale.py").exists()
    loaded = load_hf_model(folder)
    original = load_hf_model(model.base.path)
    assert type(loaded) is type(original)
    has_rows = model.own_row_of is not None
    is_tied = model.base.spec.tie_word_embeddings and not has_rows
    if model.plan.expansion is None:
        assert loaded.config.tie_word_embeddings == is_tied
    tokens = some_tokens(model.spec, 2, 16)
    assert_near(unwidened(open_base(folder)).logits(tokens), loaded(tokens).logits, PARITY)


def test_a_merged_export_is_verified(models, tmp_path):
    """Its added channels count in the mean square, of own gains too."""
    model = models("llama tied", "own merged")
    folder = exported(model, "merged", tmp_path / "hf")
    probe = {"text": list(some_tokens(model.spec, 2, 16))}
    stored = getattr(load_hf_model(folder).config, RESIDUAL_KEY)
    report = verify(model, folder, probe, torch.float32, stored["scale"])
    assert report.max_abs < PARITY
    with pytest.raises(
        ConversionError, match=r"cannot be exported with --format merged.*a gate decides"
    ):
        gated = replace(
            model, gate=random_gate(training_decoder(model), some_tokens(model.spec, 2, 8))
        )
        choose_export(gated, "merged", torch.float32)


@pytest.mark.full
def test_gains_of_heads_are_not_merged_with_added_heads(models):
    with pytest.raises(ConversionError, match=r"open_gains: bases of model_type qwen3 normalise"):
        choose_export(models("qwen3", "own preserve merged"), "merged", torch.float32)


def test_an_expansion_carries_them(models, tmp_path):
    """A run that trains it further has the same tokens with rows of their own."""
    model = models("llama", "own adapt")
    output = tmp_path / "expansion"
    request = Conversion(model.checkpoint, model.base.path, output, "expansion")
    assert convert(request, probe_maker({}))
    expansion = open_expansion(output)
    assert expansion.manifest.own_tokens == model.plan.own.tokens
    method = Scale(model.settings, output, model.manifest.run.seed)
    decoder = method.build(model.base.spec, training_decoder(model).tp, "none")
    method.load(decoder, model.base, decoder.tp)
    tokens = some_tokens(model.spec, 2, 16)
    assert torch.equal(decoder.logits(tokens), training_decoder(model).logits(tokens))
