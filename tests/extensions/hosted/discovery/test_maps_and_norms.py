"""The linear maps and norms of hosted bases that can have open weights, by hand."""

from __future__ import annotations

import pytest

from pipeline.extensions.hosted.discovery.find_structure import find_structure
from pipeline.extensions.hosted.read_spec import hosted_spec_of
from pipeline.open_weights import OpenWeights
from tests.extensions.hosted.expected import FULL, QUICK

ATTENTION = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o"))
FFN = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
SHARED = tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
BOTH = ("input_layernorm", "post_attention_layernorm")
HEADS = ("self_attn.q_norm", "self_attn.k_norm")
DELTA = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
LATENT = tuple(
    f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
)
LATENT_NORMS = ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
EXPECTED = {
    # Type: a layer, its maps and its norms. Experts are one tensor, and a router is none of them.
    "qwen3_moe": (0, ATTENTION, (BOTH[0], *HEADS, BOTH[1])),
    "gpt2": (0, ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), ("ln_1", "ln_2")),
    "phi": (
        0,
        (*ATTENTION[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
        ("input_layernorm",),
    ),
    # The code of its attention reads the weights of kv_b_proj without calling it.
    "deepseek_v3": (-1, (*LATENT, *SHARED), (BOTH[0], *LATENT_NORMS, BOTH[1])),
    # The norm within its linear attention takes two tensors.
    "qwen3_5": (0, (*DELTA, "linear_attn.out_proj", *FFN), BOTH),
}
QUICK_TYPES = ("qwen3_moe",)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in QUICK_TYPES else pytest.mark.full)
        for name in EXPECTED
    ],
)
def test_maps_and_norms_are_those_of_the_modelling_code(model_type):
    index, maps, norms = EXPECTED[model_type]
    structure = find_structure((QUICK | FULL)[model_type].config())
    layer = structure.layers[index]
    assert layer.linear_maps == maps
    assert layer.norms == norms
    assert len(structure.last_norms) == 1


def test_the_dry_run_names_what_has_own_weights():
    spec = hosted_spec_of({"model_type": "qwen3_moe", "num_hidden_layers": 3})
    own = OpenWeights(first_layer=1, gains=True, low_rank=2)
    maps = ", ".join((*ATTENTION, BOTH[0], *HEADS, BOTH[1]))
    assert spec.describe_own(own) == f"in 2 layers {maps}; none of experts and routers"
    gains = OpenWeights(first_layer=2, gains=True)
    assert spec.describe_own(gains).startswith("in 1 layer input_layernorm, self_attn.q_norm")
