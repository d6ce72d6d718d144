"""Which types of transformers can be a base: natively, hosted, or not at all, and why.

Each type is tried with its configuration's defaults, on its tiny copy. A checkpoint's own
configuration may ask for more, and is tried when a run opens its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from pipeline.errors import UserError
from pipeline.extensions.hosted.read_spec import hosted_spec_of, read_hosted_spec
from pipeline.extensions.hosted.structure import DocumentSeparation, HostedLayer, HostedStructure
from pipeline.model.families import FAMILIES

Use = Literal["native", "hosted", "refused"]

_DOCUMENTS: dict[DocumentSeparation, str] = {
    "positions": "positions that restart",
    "four_positions": "four rows of positions",
    "mask": "a mask",
    "layer_masks": "masks by type of layer",
    "one_document": "one document a row",
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_QWEN_VL = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}}}
_HALF_ROPE = {**_ROPE, "partial_rotary_factor": 0.5}
_GLM_V = {"text_config": {"rope_parameters": {**_HALF_ROPE, "mrope_section": [8, 12, 12]}}}
_QWEN4 = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
_CHECKPOINT_ENTRIES: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"hidden_size": 1152, "num_attention_heads": 16}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "deepseek_ocr2": {
        "text_config": {
            "num_hidden_layers": 12,
            "mlp_layer_types": ["dense"] + ["sparse"] * 11,
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    },
    "glm46v": _GLM_V,
    "glm4v": _GLM_V,
    "glm4v_moe": _GLM_V,
    "glm_ocr": _GLM_V,
    "glmga": _GLM_V,
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm2_vl": {"text_config": _LFM2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "paddleocr_vl": _QWEN_VL,
    "qwen2_5_omni_thinker": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}


@dataclass(frozen=True)
class BaseType:
    """What became of a type.

    Attributes:
        model_type: the type.
        use: how a base of it runs.
        structure: its structure as a hosted base; None: it has none that is understood.
        reason: why not; empty where there is a structure.
    """

    model_type: str
    use: Use
    structure: HostedStructure | None
    reason: str = ""

    def row(self) -> str:
        """The type as a row of a Markdown table: type, use, class, blocks, documents."""
        if self.structure is None:
            cells = [f"`{self.model_type}`", self.use, "", self.reason.replace("|", r"\|"), ""]
        else:
            cells = [
                f"`{self.model_type}`",
                self.use,
                self.structure.model_class,
                describe_layers(self.structure),
                _DOCUMENTS[self.structure.documents],
            ]
        return f"| {' | '.join(cells)} |"


def all_types() -> list[str]:
    """Every type with a causal language model, then those with an image-text model only."""
    types = dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    types.update(dict.fromkeys(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
    return list(types)


def entries_of(model_type: str) -> Mapping[str, Any]:
    """What a configuration of this type lacks by default, and those of its checkpoints have."""
    return _CHECKPOINT_ENTRIES.get(model_type, {})


def survey(types: Iterable[str]) -> Iterator[BaseType]:
    """Tries each of `types`: a `model_type`, or a model's folder or config.json."""
    for name in types:
        model_type = name
        structure: HostedStructure | None = None
        reason = ""
        try:
            if name in tuple(CONFIG_MAPPING) or not Path(name).exists():
                structure = hosted_spec_of({"model_type": name, **entries_of(name)}).structure
            else:
                spec = read_hosted_spec(Path(name))
                model_type = spec.family
                structure = spec.structure
        except UserError as error:
            reason = str(error)
        use: Use = "refused" if structure is None else "hosted"
        if model_type in tuple(FAMILIES):
            use = "native"
        yield BaseType(model_type, use, structure, reason)


def describe_layers(structure: HostedStructure) -> str:
    """The blocks of each kind of layer, as text: `LlamaAttention, LlamaMLP`.

    A block that does not read the one before it is marked as beside it.
    """
    kinds = dict.fromkeys(_describe_layer(layer) for layer in structure.layers)
    return "; ".join(kinds)


def _describe_layer(layer: HostedLayer) -> str:
    names: list[str] = []
    for index, block in enumerate(layer.blocks):
        name = block.module_class
        if block.input_module != block.name:
            name = f"{block.input_module} and {block.name}"
        if block.shares_keys:
            name += " (keys of another layer)"
        if index > 0 and index - 1 not in block.reads:
            name = f"beside it {name}"
        names.append(name)
    return ", ".join(names)
