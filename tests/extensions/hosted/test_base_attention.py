"""A hosted base that attends by the kernels of native bases, without masks of all pairs of tokens.

GPUs take these kernels. Here a CPU does, by whose kernel each row has a mask of ours; what is asked
of transformers is the same. `tests/fake_cuda` looks at what a GPU's step makes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING

from pipeline.extensions.hosted import base_attention
from pipeline.extensions.hosted.base_attention import (
    NAME,
    ROWS,
    AttentionRows,
    BaseAttention,
    UnsupportedAttentionError,
    attend,
)
from pipeline.extensions.hosted.discovery.document_kernels import kernels_unsupported_reason
from pipeline.extensions.hosted.discovery.document_separation import find_separation
from pipeline.extensions.hosted.discovery.tiny_copy import build_tiny_copy
from pipeline.model.architecture import architecture_of
from pipeline.model.flash_attention import choose_flash_attention
from tests.extensions.hosted.bases import by_transformers, hosted, saved_in
from tests.widened import packed, some_batch, some_tokens, trained_gradients

NOISE = 0.05
# Grouped heads, experts, scales, windows with capped scores, latent attention, another class of
# linear maps, windows alone.
SUPPORTED = [
    "llama",
    "qwen3_moe",
    "granite",
    "gemma2",
    "deepseek_v3",
    "gpt2",
    "starcoder2",
]
LENGTHS = ([9, 14], [16, 7])
"""Of the documents of two rows: shorter and longer than the windows of 8."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("hosted"))


@pytest.fixture
def by_kernels(monkeypatch):
    """Chooses whether a base on the CPU attends by the kernels."""

    def choose(chosen):
        devices = ("cpu",) if chosen else ()
        monkeypatch.setattr(base_attention, "KERNEL_DEVICES", devices)

    return choose


def _close(found, expected):
    # Sums of another order, in fp32: the kernels take the same numbers by other masks.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_documents_of_a_row_get_what_transformers_gives_them_alone(base, by_kernels, kind):
    folder = base(kind)
    by_kernels(True)
    model = hosted(folder)  # at its initial expansion, with which logits are the base's
    positions, documents = packed(*LENGTHS)
    tokens = some_tokens(folder.spec, 2, 23)
    together = model.logits(tokens, positions, documents)
    theirs = by_transformers(folder)
    for row, (first, _) in enumerate(LENGTHS):
        for part in (slice(None, first), slice(first, None)):
            with torch.no_grad():
                alone = theirs(tokens[row : row + 1, part], use_cache=False).logits
            _close(together[row : row + 1, part], alone)


@pytest.mark.parametrize("recomputed", ["none", "all"])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_step_equals_that_with_masks(base, by_kernels, kind, recomputed):
    folder = base(kind)
    tokens, targets = some_batch(folder.spec, 2, 23)
    positions, documents = packed(*LENGTHS)
    found = {}
    for chosen in (False, True):
        by_kernels(chosen)
        model = hosted(folder, noise=NOISE, activation_checkpointing=recomputed)
        model.train()
        losses = model(tokens, targets, positions, documents)
        losses.total.backward()
        found[chosen] = losses.total.detach(), trained_gradients(model)
    (loss, gradients), (expected_loss, expected) = found[True], found[False]
    _close(loss, expected_loss)
    for name, gradient in gradients.items():
        _close(gradient, expected[name])


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_a_layer_computed_again_attends_as_before(base, by_kernels, kind):
    """By when the backward pass computes it, the configuration names transformers' attention."""
    folder = base(kind)
    by_kernels(True)
    tokens, targets = some_batch(folder.spec, 2, 23)
    positions, documents = packed(*LENGTHS)
    found = []
    for recomputed in ("none", "all"):
        model = hosted(folder, noise=NOISE, activation_checkpointing=recomputed)
        model.train()
        model(tokens, targets, positions, documents).total.backward()
        found.append(trained_gradients(model))
    plain, again = found
    for name, gradient in again.items():
        assert torch.equal(gradient, plain[name]), name


@pytest.mark.parametrize("kind", ["gemma2", "starcoder2", "llama"])
def test_rows_of_one_document_need_no_masks_either(base, by_kernels, kind):
    folder = base(kind)
    model = hosted(folder, noise=NOISE)
    tokens = some_tokens(folder.spec, 2, 23)
    positions, _ = packed(*LENGTHS)
    # Whole rows, and rows whose documents attend to each other.
    for given in (None, positions):
        by_kernels(False)
        expected = model.logits(tokens, given)
        by_kernels(True)
        _close(model.logits(tokens, given), expected)


def test_only_a_pass_by_kernels_changes_what_a_base_calls(base, by_kernels):
    folder = base("llama")
    model = hosted(folder)
    tokens = some_tokens(folder.spec, 2, 23)
    config = model.base.config
    before = config._attn_implementation
    seen = []
    layer = model.base.get_submodule("model.layers.1")
    layer.register_forward_pre_hook(lambda *_: seen.append(config._attn_implementation))
    by_kernels(True)
    model.logits(tokens)
    by_kernels(False)
    expected = model.logits(tokens)
    assert seen == [NAME, before] and before != NAME
    assert config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(model.base(tokens, use_cache=False).logits, expected)


def test_an_export_and_a_checkpoint_know_nothing_of_the_kernels(base):
    spec = base("gpt_oss").spec
    assert spec.kernels_unsupported_reason is not None
    assert "kernels_unsupported_reason" not in architecture_of(spec)
    assert NAME not in hosted(base("llama")).base.config.to_json_string()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("llama", "transformers computes the base and calls torch's kernels, without masks"),
        (
            "gpt_oss",
            "transformers computes the base's attention, with masks of all pairs of tokens: "
            "GptOssAttention changes its scores (s_aux)",
        ),
        ("qwen3_next", "transformers computes the base's attention"),
    ],
)
def test_the_log_says_how_a_base_attends(base, kind, text):
    chosen = choose_flash_attention("auto", base(kind).spec, torch.bfloat16, None, None)
    assert chosen.text == f"torch's kernels: {text}"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        # Attention in chunks, of which no argument of the function says anything.
        ("llama4_text", "its attention does more than the kernels compute"),
        # Its own code, which adds a mask that it must get.
        ("falcon", "its code does not run without them"),
        # Its own code, which made its mask by itself.
        ("gptj", "its attention is code of its own"),
        ("doge", "DogeAttention has a mask of its own"),
        ("opt", None),
        ("gemma3_text", None),
    ],
)
def test_which_bases_attend_by_kernels_is_tried(model_type, reason):
    layers = {"n_layer": 4} if model_type == "gptj" else {"num_hidden_layers": 4}
    config = CONFIG_MAPPING[model_type](**layers)
    tiny = build_tiny_copy(config)
    found = kernels_unsupported_reason(tiny, find_separation(tiny))
    assert (found is None) == (reason is None)
    # Behind the reason may stand the error that the code raised.
    assert str(found).startswith(str(reason))


def test_an_attention_that_ignores_its_windows_is_found(monkeypatch):
    tiny = build_tiny_copy(CONFIG_MAPPING["gemma3_text"](num_hidden_layers=6))
    assert kernels_unsupported_reason(tiny, "positions") is None
    kernel = AttentionRows.kernel

    def without_window(rows, dtype, head_dim, window, scale, softcap):
        return kernel(rows, dtype, head_dim, None, scale, softcap)

    monkeypatch.setattr(AttentionRows, "kernel", without_window)
    reason = kernels_unsupported_reason(tiny, "positions")
    assert reason == "its attention does more than the kernels compute"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({ROWS: None}, "does not get the arguments"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "mask of its own"),
        ({"s_aux": torch.zeros(2)}, r"changes its scores \(s_aux\)"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "not causal, or has dropout"),
        ({"key": torch.zeros(1, 2, 5, 8)}, "other tokens than its rows'"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(changed, message):
    heads = torch.zeros(1, 2, 4, 8)
    rows = AttentionRows(torch.zeros(1, 4, dtype=torch.long), None)
    given = {"query": heads, "key": heads, "value": heads, "attention_mask": None, ROWS: rows}
    module = SimpleNamespace(is_causal=True)
    assert attend(module, **given)[0].shape == (1, 4, 2, 8)
    with pytest.raises(UnsupportedAttentionError, match=message):
        attend(module, **{**given, **changed})


def test_the_configurations_of_all_parts_are_named_and_restored():
    config = CONFIG_MAPPING["gemma3"](text_config={"num_hidden_layers": 2})
    tiny = build_tiny_copy(config)
    attention = BaseAttention(tiny)
    text = tiny.config.get_text_config()
    text._attn_implementation_internal = "eager"
    before = (tiny.config._attn_implementation, text._attn_implementation)
    with pytest.raises(RuntimeError), attention.by_kernels():
        assert tiny.config._attn_implementation == text._attn_implementation == NAME
        raise RuntimeError("a pass that fails")
    assert (tiny.config._attn_implementation, text._attn_implementation) == before
