"""An architecture survives the entries of a config.json, of every family and of architectures that
none has yet.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.method import Initialisers
from pipeline.hf.config import config_to_widened, widened_to_config
from pipeline.hf.remote_code.configuration_scale import AddedConfig, ScaleConfig
from pipeline.model.families import FAMILIES
from pipeline.model.spec import (
    ACTIVATIONS,
    DecoderSpec,
    LayerKind,
    MixtureSpec,
    RotarySpec,
    StoredResidual,
)
from pipeline.open_weights import OpenWeights
from pipeline.scale.plan import ExpansionPlan, Widths
from tests.bases import CONFIGS

SIZES = st.integers(1, 2**17)
NUMBERS = st.floats(1e-6, 1e6)
OPTIONAL_NUMBERS = st.none() | NUMBERS
FREQUENCIES = st.lists(NUMBERS, min_size=1, max_size=3).map(tuple)

widths = st.builds(Widths, SIZES, SIZES, SIZES, SIZES)
rotary_specs = st.builds(
    RotarySpec, FREQUENCIES, NUMBERS, st.none() | SIZES, st.none() | FREQUENCIES
)
mixtures = st.builds(
    MixtureSpec,
    experts=SIZES,
    top_k=SIZES,
    intermediate_size=SIZES,
    normalised=st.booleans(),
    scale=NUMBERS,
    sigmoid=st.booleans(),
    shared_size=SIZES,
    gated=st.booleans(),
    balance_coefficient=OPTIONAL_NUMBERS,
)


@st.composite
def specs(draw: st.DrawFn) -> DecoderSpec:
    """Architectures with all features in any combination."""
    window = draw(SIZES)
    layer_kinds = st.builds(
        LayerKind, st.none() | rotary_specs, st.sampled_from([None, window]), st.booleans()
    )
    placement = draw(st.sampled_from(["before", "after", "both"]))
    residuals = st.builds(StoredResidual, SIZES, NUMBERS, st.just(placement == "after"))
    return DecoderSpec(
        family=draw(st.sampled_from(sorted(FAMILIES))),
        vocab_size=draw(SIZES),
        layers=tuple(draw(st.lists(layer_kinds, min_size=1, max_size=5))),
        widths=draw(widths),
        head_dim=draw(SIZES),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        norm_eps=draw(NUMBERS),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        max_position_embeddings=draw(SIZES),
        gated_ffn=draw(st.booleans()),
        query_key_value_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        ffn_bias=draw(st.booleans()),
        parallel_residual=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        norm_placement=placement,
        gain_offset=draw(st.booleans()),
        rounds_once=draw(st.booleans()),
        query_key_norm=draw(st.sampled_from(["none", "head", "all"])),
        embedding_scale=draw(NUMBERS),
        attention_scale=draw(OPTIONAL_NUMBERS),
        attention_softcap=draw(OPTIONAL_NUMBERS),
        output_softcap=draw(OPTIONAL_NUMBERS),
        mixture=draw(st.none() | mixtures),
        residual=draw(st.none() | residuals),
    )


own_weights = st.builds(
    OpenWeights,
    first_layer=st.integers(0, 4),
    tokens=st.none() | st.sets(SIZES, min_size=1, max_size=5).map(sorted).map(tuple),
    gains=st.booleans(),
    low_rank=st.none() | SIZES,
    low_rank_scale=NUMBERS,
    low_rank_maps=st.none() | st.sets(st.sampled_from(["query", "up"]), min_size=1).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn, num_layers: int) -> ExpansionPlan:
    return ExpansionPlan(
        expansion=draw(st.none() | widths),
        num_layers=num_layers,
        l_fp=draw(st.integers(0, num_layers)),
        collaborative_modules=draw(st.frozensets(st.sampled_from(["attention", "ffn"]))),
        routed=draw(st.booleans()),
        router_threshold=draw(st.floats(0, 1)),
        norm=draw(st.sampled_from(["separate", "base"])),
        own=draw(st.none() | own_weights),
    )


def assert_survives(spec: DecoderSpec, plan: ExpansionPlan) -> None:
    written = json.loads(json.dumps(widened_to_config(spec, plan)))
    own_tokens = None if plan.own is None else plan.own.tokens
    assert config_to_widened(written, spec.family, own_tokens) == (spec, plan)
    if own_tokens is not None:  # the ids are a tensor beside the weights
        assert written["own_rows"] == len(own_tokens) + 1


@given(st.data())
def test_every_architecture_survives(data):
    spec = data.draw(specs())
    assert_survives(spec, data.draw(plans(spec.num_layers)))


def test_the_examples_vary_every_field():
    """So that no field can be added to an architecture and to neither of the two functions."""
    found: dict[str, set] = {field.name: set() for field in fields(DecoderSpec)}

    @given(specs())
    def collect(spec: DecoderSpec) -> None:
        for name, values in found.items():
            values.add(getattr(spec, name))

    collect()
    # An export has no tokens beside its vocabulary.
    assert {name for name, values in found.items() if len(values) == 1} == {
        "new_tokens",
        "added_tokens",
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_the_architecture_of_every_base_survives(name, base):
    spec = base(name).spec
    expansion = Widths(12, 8, 4, 2)
    assert_survives(spec, ExpansionPlan(expansion, spec.num_layers, l_fp=1))


def test_how_blocks_start_is_not_written():
    plan = ExpansionPlan(Widths(12, 8, 4, 2), 2, l_fp=1)
    other = replace(plan, initialisers=Initialisers(base_to_expansion="zero"))
    spec = DecoderSpec(
        "llama", 9, (LayerKind(None),) * 2, plan.expansion, 4, "rmsnorm", 1e-5, "silu", 9
    )
    assert widened_to_config(spec, other) == widened_to_config(spec, plan)


@given(st.data())
def test_the_code_of_an_export_declares_every_entry(data):
    """And takes each as it is written."""
    spec = data.draw(specs())
    written = widened_to_config(spec, data.draw(plans(spec.num_layers)))
    declared = {
        *AddedConfig.__annotations__,
        *ScaleConfig.__annotations__,
        "tie_word_embeddings",
    }
    assert written.keys() <= declared
    read = ScaleConfig(**written)
    for name, value in written.items():
        assert getattr(read, name) == value, name
