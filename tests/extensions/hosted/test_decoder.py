"""A hosted base with its expansion: what equals transformers to the bit, and what trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.errors import BaseModelError, ConfigError
from pipeline.model.attention import Documents
from pipeline.model.bases import check_dtype, computed_dtype, open_base
from pipeline.model.from_hf import is_base
from tests.extensions.hosted.bases import (
    KINDS,
    by_transformers,
    hosted,
    saved_in,
)
from tests.widened import packed, some_batch, some_tokens, trained_gradients, unwidened

NOISE = 0.05


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("hosted"))


@pytest.mark.parametrize("kind", KINDS)
def test_step_zero_equals_transformers_to_the_bit(base, kind):
    folder = base(kind)
    model = hosted(folder)
    tokens = some_tokens(folder.spec, 2, 20)
    with torch.no_grad():
        expected = by_transformers(folder)(tokens, use_cache=False).logits
    assert torch.equal(model.logits(tokens), expected)
    assert torch.equal(model.logits(tokens, path="base"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_added_parameter_trains_and_the_base_stays(base, kind):
    folder = base(kind)
    model = hosted(folder, noise=NOISE)
    tokens, targets = some_batch(folder.spec, 2, 20)
    model.train()
    model(tokens, targets).total.backward()
    for name, gradient in trained_gradients(model).items():
        assert gradient.any(), name
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != is_base(name)
        assert is_base(name) == name.startswith("base.")
    with torch.no_grad():
        expected = by_transformers(folder)(tokens, use_cache=False).logits
    assert torch.equal(model.logits(tokens, path="base"), expected)
    assert torch.equal(model.logits(tokens, path="preserved"), model.logits(tokens)) is False


@pytest.mark.parametrize("kind", KINDS)
def test_preserve_keeps_the_base_stream_to_the_bit(base, kind):
    folder = base(kind)
    model = hosted(folder, "preserve", noise=NOISE)
    tokens = some_tokens(folder.spec, 2, 20)
    changed = model.hidden_states(tokens)
    assert torch.equal(changed.x, model.hidden_states(tokens, path="base").x)
    assert not torch.equal(model.logits(tokens), model.logits(tokens, path="base"))


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_give_the_same_gradients(base, kind):
    folder = base(kind)
    tokens, targets = some_batch(folder.spec, 2, 20)
    found = []
    for checkpointing in ("none", "collaborative", "all"):
        model = hosted(folder, noise=NOISE, activation_checkpointing=checkpointing)
        model.train()
        model(tokens, targets).total.backward()
        found.append(trained_gradients(model))
    plain, *recomputed = found
    for gradients in recomputed:
        for name, gradient in gradients.items():
            assert torch.equal(gradient, plain[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_do_not_see_each_other(base, kind):
    folder = base(kind)
    model = hosted(folder, noise=NOISE)
    positions, documents = packed([9, 14], [16, 7])
    tokens = some_tokens(folder.spec, 2, 23)
    together = model.logits(tokens, positions, documents)
    for row, first in ((0, 9), (1, 16)):
        for part in (slice(None, first), slice(first, None)):
            alone = model.logits(tokens[row : row + 1, part])
            torch.testing.assert_close(together[row : row + 1, part], alone, rtol=1e-4, atol=1e-4)


def test_attention_crosses_documents_where_the_run_wants_it(base):
    folder = base("llama")
    model = hosted(folder, noise=NOISE)
    positions, _ = packed([9, 14])
    tokens = some_tokens(folder.spec, 1, 23)
    other = tokens.clone()
    other[:, :9] = other[:, :9].flip(1)
    found = model.logits(tokens, positions)
    assert not torch.equal(found[:, 9:], model.logits(other, positions)[:, 9:])


@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2"])
def test_16_bits_leave_the_rotary_frequencies_alone(base, kind):
    """A cast of the whole module leaves the base's buffers as transformers loads them."""
    folder = base(kind)
    model = hosted(folder, dtype=torch.bfloat16).bfloat16()
    tokens = some_tokens(folder.spec, 2, 20)
    theirs = by_transformers(folder, torch.bfloat16)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(model.base.get_buffer(name), buffer), name
    body = theirs.get_submodule(folder.spec.body)
    with torch.no_grad():
        expected = body(tokens, use_cache=False).last_hidden_state
    assert torch.equal(model.hidden_states(tokens, path="base").x, expected.flatten(0, 1))


def test_parameters_that_transformers_keeps_in_fp32_are_refused_in_16_bits(base):
    folder = base("ernie4_5_moe")
    message = r"mlp\.gate\.weight: expected bfloat16 .* found float32, .* run in fp32"
    with pytest.raises(BaseModelError, match=message) as refusal:
        hosted(folder, dtype=torch.bfloat16)
    assert "\n" not in str(refusal.value)
    model = hosted(folder)
    tokens = some_tokens(folder.spec, 2, 20)
    with torch.no_grad():
        expected = by_transformers(folder)(tokens, use_cache=False).logits
    assert torch.equal(model.logits(tokens), expected)


def test_a_base_in_16_bits_with_such_parameters_computes_in_fp32(base, monkeypatch):
    for kind, dtype in (("granite", torch.bfloat16), ("ernie4_5_moe", torch.float32)):
        folder = base(kind)
        monkeypatch.setitem(folder.__dict__, "dtype", torch.bfloat16)
        assert computed_dtype(folder) == dtype


def test_fp16_is_refused_where_transformers_keeps_parameters_in_fp32_beside_it(base):
    """And not beside bf16: the norms of gpt_oss, whose values fp16 may not hold."""
    spec = base("gpt_oss").spec
    check_dtype(spec, torch.bfloat16)
    check_dtype(spec, torch.float32)
    message = (
        r"deepspeed: expected bf16 or fp32 .*gpt_oss.* keeps model\.layers\.0\.\S*norm\.weight in "
        r"fp32, found float16; take ds_configs/zero1\.json"
    )
    with pytest.raises(ConfigError, match=message):
        check_dtype(spec, torch.float16)
    # Where bf16 is refused as well, it is no remedy.
    with pytest.raises(ConfigError, match=r"deepspeed: expected fp32 .* found float16"):
        check_dtype(base("ernie4_5_moe").spec, torch.float16)


def test_experts_that_no_grouped_product_takes_are_refused_by_name(base, monkeypatch):
    """torch's refusal comes at the first step, and names strides alone."""
    folder = base("qwen3_moe")  # experts of 20 channels: 40 bytes in bf16, 80 in fp32
    tokens = some_tokens(folder.spec, 2, 20)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"), torch.no_grad():
        by_transformers(folder, torch.bfloat16)(tokens, use_cache=False)
    message = (
        r"deepspeed: expected fp32 with a hosted base \(model_type qwen3_moe\), whose experts "
        r"model\.layers\.0\.mlp\.experts\.down_proj have matrices of 32 x 20, .*, found bfloat16; "
        r"take ds_configs/zero1_fp32\.json"
    )
    with pytest.raises(ConfigError, match=message) as refusal:
        check_dtype(folder.spec, torch.bfloat16)
    assert "\n" not in str(refusal.value)
    check_dtype(folder.spec, torch.float32)
    monkeypatch.setitem(folder.__dict__, "dtype", torch.bfloat16)
    assert computed_dtype(folder) == torch.float32


def test_experts_that_fit_no_type_are_refused(base):
    spec = base("qwen3_moe").spec
    spec = replace(spec, config={**spec.config, "moe_intermediate_size": 18})
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(
            ConfigError, match=r"base: no type .* have matrices of .*; take another base"
        ):
            check_dtype(spec, dtype)


def test_gradients_of_a_scaled_output_are_those_of_autograd(base):
    for kind in ("granite", "gemma2", "phi"):
        folder = base(kind)
        model = hosted(folder, noise=NOISE)
        tokens, targets = some_batch(folder.spec, 2, 20)
        losses = model(tokens, targets)
        losses.total.backward()
        found = trained_gradients(model)
        model.zero_grad()
        hidden = model.hidden_states(tokens)
        of_base = model.output._base_logits(hidden.x, model.output.base)
        z = of_base + hidden.x_up @ model.output.expansion.T
        scale = folder.spec.logit_scale
        z = z / scale.factor if scale.divides else z * scale.factor
        if (cap := folder.spec.output_softcap) is not None:
            z = torch.tanh(z / cap) * cap
        expected = torch.nn.functional.cross_entropy(z, targets.flatten(), reduction="sum")
        expected.backward()
        torch.testing.assert_close(losses.total, expected)
        for name, gradient in trained_gradients(model).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


def test_kl_compares_with_the_base(base):
    folder = base("llama")
    tokens, targets = some_batch(folder.spec, 3, 20)
    for variant in ("preserve", "adapt"):
        model = hosted(folder, variant, noise=NOISE)
        found = model(tokens, targets, None, None, 2, 2)
        model_log = model.logits(tokens)[:2].log_softmax(-1)
        base_log = model.logits(tokens, path="base")[:2].log_softmax(-1)
        expected = (base_log.exp() * (base_log - model_log)).sum(-1)
        expected = expected.masked_fill(targets[:2] == -100, 0)
        torch.testing.assert_close(found.kl[:2], expected, rtol=1e-4, atol=1e-5)
        assert not found.kl[2:].any() and not found.nll[:2].any()


def test_documents_record_where_they_lie(base):
    """Padding rows of one document a row changes nothing."""
    folder = base("mamba")
    assert folder.spec.structure.documents == "one_document"
    model = hosted(folder, noise=NOISE)
    tokens = some_tokens(folder.spec, 2, 20)
    rows = Documents.whole_rows(tokens)
    positions = torch.arange(20).expand(2, 20)
    assert torch.equal(model.logits(tokens, positions, rows), model.logits(tokens))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_hosted_base_has_the_logits_of_the_native_one(base, kind):
    folder = base(kind)
    native = unwidened(open_base(folder.path, "native"))
    tokens = some_tokens(folder.spec, 2, 20)
    positions, documents = packed([9, 11], [4, 16])
    model = hosted(folder)
    torch.testing.assert_close(
        model.logits(tokens, positions, documents, path="base"),
        native.logits(tokens, positions, documents),
        rtol=1e-5,
        atol=1e-5,
    )
