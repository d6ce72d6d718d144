"""The format `scale` on a hosted base: the base's weights as transformers loads them, the
expansion, and the code that runs both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.extensions.hosted.added_blocks import block_names
from pipeline.extensions.hosted.folder import HostedFolder
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.hf.base_files import text_token_ids, without_mtp_layers
from pipeline.hf.config import gate_to_config
from pipeline.hf.gate_tensors import gate_tensors
from pipeline.hf.own_row_tables import own_row_tables
from pipeline.hf.remote_code.configuration_scale import NEEDED
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from pipeline.hf.write import Export, PlannedTensor, code_files, dtype_name
from pipeline.parallel.parameters import named_trained_parameters
from pipeline.scale.plan import ExpansionPlan, Widths, added_widths

_MEDIA_TOKEN = re.compile(r"(image|video|audio|vision|speech)_token_(id|index)")
"""Names of these ids in config.json: `image_token_id`, in older model types `image_token_index`."""


def hosted_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """The contents of the exported folder. The whole base is in memory until they are written."""
    assert isinstance(model.base, HostedFolder) and model.plan is not None, "its caller has seen it"
    spec = model.base.spec
    code = f"modeling_scale_hosted.{HostedScaleForCausalLM.__name__}"
    auto_map = {
        "AutoConfig": "configuration_scale_hosted.HostedScaleConfig",
        "AutoModelForCausalLM": code,
    }
    if spec.structure.model_class in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        # So that programs that ask for a model with pictures find this one.
        auto_map["AutoModelForImageTextToText"] = code
    config = {
        "architectures": [HostedScaleForCausalLM.__name__],
        "auto_map": auto_map,
        "model_type": HostedScaleConfig.model_type,
        **config_entries(spec, model.plan),
        "dtype": dtype_name(dtype),
        "transformers_version": NEEDED,
        "tie_word_embeddings": False,
    }
    config |= text_token_ids(spec.config)

    tensors: list[PlannedTensor] = []
    whole = model.base.whole(dtype)
    for name, tensor in whole.state_dict().items():
        # With its own dtype: transformers keeps some in fp32 in a model of 16 bits.
        make = partial(_itself, tensor)
        tensors.append(PlannedTensor(f"base.{name}", tuple(tensor.shape), make, tensor.dtype))
    for name, parameter in named_trained_parameters(model.structure):
        make = partial(model.read, name)
        tensors.append(PlannedTensor(name, tuple(parameter.shape), make))
    tensors += own_row_tables(model.own_row_of)
    if model.gate is not None:
        config |= gate_to_config(model.gate)
        tensors += gate_tensors(model.gate, spec.vocab_size)
    return Export("scale", config, tensors, dtype, code_files(HostedScaleForCausalLM))


def config_entries(spec: HostedSpec, plan: ExpansionPlan) -> dict[str, Any]:
    """The entries of config.json for the base, and for what `plan` adds to it."""
    return {
        **_sizes(spec, plan),
        "base_class": spec.structure.model_class,
        "base_config": _base_config(spec),
        "structure": _structure(spec, plan),
        "media_token_ids": _media_token_ids(spec.config),
        **_own_weights(plan),
    }


def _base_config(spec: HostedSpec) -> dict[str, Any]:
    """The base's config.json without quantization: its weights are written dequantized, as
    training read them; and without layers that the export does not have.
    """
    config = without_mtp_layers(spec.config)
    config.pop("quantization_config", None)
    return config


def _media_token_ids(config: Mapping[str, Any]) -> list[int]:
    """The ids that stand for pictures, videos and sound in a text, in the base's config.json."""
    found: set[int] = set()
    for name, value in config.items():
        if isinstance(value, int) and _MEDIA_TOKEN.fullmatch(name):
            found.add(value)
    return sorted(found)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _sizes(spec: HostedSpec, plan: ExpansionPlan) -> dict[str, Any]:
    """The entries of config.json that describe the expansion."""
    rotary = spec.layers[0].rotary
    assert rotary is not None, "added heads of a hosted base are rotated"
    added = added_widths(plan) or Widths(0, 0, 0, 0)
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.widths.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "expansion_hidden_size": added.hidden_size,
        "expansion_intermediate_size": added.intermediate_size,
        "expansion_num_attention_heads": added.num_attention_heads,
        "expansion_num_key_value_heads": added.num_key_value_heads,
        "l_fp": plan.l_fp,
        "collaborative_modules": sorted(plan.collaborative_modules),
        "norm_eps": spec.norm_eps,
        "hidden_act": spec.activation,
        "frequencies": list(rotary.frequencies),
    }


def _own_weights(plan: ExpansionPlan) -> dict[str, Any]:
    """The entries of config.json for weights that only open tokens read; none without them."""
    own = plan.own
    if own is None:
        return {}
    # Its low-rank differences are of all maps.
    return {name: value for name, value in own.config_entries().items() if name != "own_maps"}


def _structure(spec: HostedSpec, plan: ExpansionPlan) -> dict[str, Any]:
    """Which modules of the base have blocks of the expansion beside them, for the exported code."""
    structure = spec.structure
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(structure.layers):
        blocks: list[dict[str, Any]] = []
        # LoRA under a gate has open weights, and no blocks.
        beside = layer.blocks if plan.expansion is not None else ()
        for added, block in zip(block_names(beside), beside, strict=True):
            blocks.append(
                {
                    "added": added,
                    "kind": block.kind,
                    "name": block.name,
                    "input_module": block.input_module,
                    "input_argument": block.input_argument,
                    "output_index": block.output_index,
                    "output_changed_in_place": block.output_changed_in_place,
                    "reads": list(block.reads),
                }
            )
        written: dict[str, Any] = {"name": structure.layer_name(layer), "blocks": blocks}
        own = plan.own_in(index)
        if own is not None and own.low_rank is not None:
            written["linear_maps"] = list(layer.linear_maps)
        if plan.has_own_gains(index):
            written["norms"] = list(layer.norms)
        layers.append(written)
    values: dict[str, Any] = {
        "layers": layers,
        "output": structure.output,
        "shares_keys": structure.shares_keys,
    }
    if plan.has_own_gains(spec.num_layers):
        values["last_norms"] = list(structure.last_norms)
    return values
