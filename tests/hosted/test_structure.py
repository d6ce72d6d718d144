"""The record of a hosted base's structure: JSON and back, and differences as text."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from pipeline.errors import BaseModelError
from pipeline.hosted.structure import HostedBlock, HostedLayer, HostedStructure, difference

LLAMA_BLOCKS = (
    HostedBlock(
        name="self_attn",
        module_class="LlamaAttention",
        kind="mixer",
        input_module="self_attn",
        input_argument="hidden_states",
        output_index=0,
    ),
    HostedBlock(
        name="mlp",
        module_class="LlamaMLP",
        kind="ffn",
        input_module="mlp",
        input_argument=0,
        reads=(0,),
    ),
)
LLAMA = HostedStructure(
    model_type="llama",
    model_class="LlamaForCausalLM",
    hidden_size=64,
    layer_list="model.layers",
    layers=tuple(HostedLayer(index, "LlamaDecoderLayer", LLAMA_BLOCKS) for index in range(4)),
    embedding="model.embed_tokens",
    output="lm_head",
    documents="positions",
)


def test_json_holds_each_kind_of_layer_once_and_gives_the_structure_back():
    values = orjson.loads(orjson.dumps(LLAMA.to_json()))
    assert len(values["layers"]["kinds"]) == 1
    assert HostedStructure.from_json(values) == LLAMA


@pytest.mark.parametrize("values", [{}, {"layers": []}, {**LLAMA.to_json(), "documents": "none"}])
def test_other_json_is_refused_in_one_line(values):
    with pytest.raises(BaseModelError, match="not the structure of a hosted base") as refusal:
        HostedStructure.from_json(values)
    assert "\n" not in str(refusal.value)


def _with_ffn(**changes) -> HostedStructure:
    blocks = (LLAMA_BLOCKS[0], replace(LLAMA_BLOCKS[1], **changes))
    layers = (*LLAMA.layers[:3], replace(LLAMA.layers[3], blocks=blocks))
    return replace(LLAMA, layers=layers)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (LLAMA, None),
        (_with_ffn(additivity=0.95), None),
        (_with_ffn(additivity=0.5), "model.layers.3: mlp: additivity: expected 1.0, found 0.5"),
        (_with_ffn(kind="mixer"), "model.layers.3: mlp: kind: expected 'ffn', found 'mixer'"),
        (
            _with_ffn(name="ffn"),
            "model.layers.3: blocks: expected self_attn, mlp, found self_attn, ffn",
        ),
        (replace(LLAMA, layers=LLAMA.layers[:3]), "layers: expected 4, found 3"),
        (replace(LLAMA, documents="mask"), "documents: expected 'positions', found 'mask'"),
    ],
)
def test_the_first_difference_is_named(found, text):
    assert difference(LLAMA, found) == text


def test_module_names_are_those_of_the_model():
    names = list(LLAMA.module_names())
    assert names[:3] == ["model.embed_tokens", "lm_head", "model.layers.0"]
    assert "model.layers.3.self_attn" in names
