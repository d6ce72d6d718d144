"""The record of a hosted base's structure as JSON, and its changes as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from pipeline.extensions.hosted.structure import HostedBlock, HostedLayer, HostedStructure
from pipeline.model.architecture import changed_entry

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


def _as_json(structure: HostedStructure) -> dict[str, Any]:
    return orjson.loads(orjson.dumps(structure.to_json()))


def test_json_holds_each_kind_of_layer_once():
    layers = _as_json(LLAMA)["layers"]
    assert len(layers["kinds"]) == 1
    assert layers["indices"] == [0, 1, 2, 3]
    assert layers["kind_of"] == [0, 0, 0, 0]


def _with_ffn(**changes) -> HostedStructure:
    blocks = (LLAMA_BLOCKS[0], replace(LLAMA_BLOCKS[1], **changes))
    layers = (*LLAMA.layers[:3], replace(LLAMA.layers[3], blocks=blocks))
    return replace(LLAMA, layers=layers)


def _with_additivity(additivity: float) -> HostedStructure:
    """All layers with another additivity of their FFN."""
    blocks = (LLAMA_BLOCKS[0], replace(LLAMA_BLOCKS[1], additivity=additivity))
    layers = tuple(replace(layer, blocks=blocks) for layer in LLAMA.layers)
    return replace(LLAMA, layers=layers)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (LLAMA, None),
        # Two measurements may be 0.1 apart.
        (_with_additivity(0.95), None),
        (
            _with_additivity(0.5),
            "layers.kinds.0.blocks.1.additivity (expected 1.0, found 0.5)",
        ),
        (_with_ffn(kind="mixer"), "layers.kinds (expected "),
        (replace(LLAMA, layers=LLAMA.layers[:3]), "layers.indices (expected [0, 1, 2, 3], found "),
        (replace(LLAMA, documents="mask"), "documents (expected 'positions', found 'mask')"),
        (replace(LLAMA, has_one_stream=False), "has_one_stream (expected True, found False)"),
    ],
)
def test_the_first_change_of_a_recorded_structure_is_named(found, text):
    changed = changed_entry(_as_json(LLAMA), _as_json(found))
    if text is None:
        assert changed is None
    else:
        assert changed is not None and changed.startswith(text)
