"""Which weights open tokens read, of settings and of exports, and which of them can be merged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.config.method import Lora
from pipeline.errors import ConfigError
from pipeline.open_weights import OpenWeights, open_weights_in, open_weights_of
from tests.widened import scale_settings

LAYERS = 4
TOKENS = (2, 3, 5)
ALL = {"open_rows": {"min_count": 1}, "open_gains": True}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (scale_settings("adapt"), None),
        (scale_settings("adapt", open_gains=True), OpenWeights(1, gains=True)),
        (scale_settings("adapt", low_rank=3, l_fp=2), OpenWeights(2, low_rank=3)),
        (
            scale_settings("preserve", open_first_layer=3, **ALL),
            OpenWeights(3, tokens=TOKENS, gains=True),
        ),
        # LoRA's factors are open weights, with or without a gate.
        (Lora(name="lora", rank=2), OpenWeights(0, low_rank=2)),
        (
            Lora(name="lora", rank=2, alpha=3, target_modules=("up",), open_first_layer=1, **ALL),
            OpenWeights(1, TOKENS, True, 2, low_rank_scale=1.5, low_rank_maps=("up",)),
        ),
    ],
)
def test_a_method_has_the_open_weights_of_its_settings(settings, expected):
    assert open_weights_of(settings, LAYERS, TOKENS) == expected


def test_they_begin_within_the_base():
    settings = Lora(name="lora", rank=2, open_first_layer=LAYERS)
    with pytest.raises(ConfigError, match=r"method.open_first_layer: 4 leaves none .* use 0 to 3"):
        open_weights_of(settings, LAYERS, None)


def test_new_tokens_share_one_more_row():
    own = OpenWeights(0, tokens=TOKENS)
    assert own.config_entries()["own_rows"] == 4
    entries = own.config_entries(added_tokens=7)
    assert entries["own_rows"] == 5
    assert open_weights_in(entries, TOKENS) == own
    assert replace(own, tokens=None).config_entries(added_tokens=7)["own_rows"] == 0


def test_exports_of_earlier_versions_have_neither_a_scale_nor_maps():
    entries = OpenWeights(1, gains=True, low_rank=2).config_entries()
    del entries["own_scale"], entries["own_maps"]
    assert open_weights_in(entries, None) == OpenWeights(1, gains=True, low_rank=2)
    assert open_weights_in({"own_rows": 0}, None) is None


def test_what_cannot_be_merged_is_named():
    heads = {"widened": True, "norms_heads": True}
    above = OpenWeights(1, tokens=TOKENS, gains=True).unmerged_reason("qwen3", **heads)
    assert above is not None and above.startswith("method.open_rows: they enter before layer 1")
    gains = OpenWeights(0, tokens=TOKENS, gains=True)
    reason = gains.unmerged_reason("qwen3", **heads)
    assert reason is not None and "method.open_gains: bases of model_type qwen3" in reason
    assert gains.unmerged_reason("qwen3", widened=False, norms_heads=True) is None
    assert gains.unmerged_reason("llama", widened=True, norms_heads=False) is None
