"""A model of the base's own architecture, under the base's own tensor names.

Full fine-tuning and Freeze make one, LLaMA Pro makes one with more layers, and LoRA once its adapters are merged.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.conversion.export import Export, PlannedTensor
from pipeline.conversion.hf_config import base_config, dtype_name, residual_config
from pipeline.conversion.trained_model import TrainedModel
from pipeline.model.from_hf import is_base
from pipeline.model.hf_names import hf_tensor
from pipeline.model.residual import StoredResidual, scale_in


def ordinary_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """The inverse of `model.hf_names`: GPT-NeoX's query, key and value become one tensor [heads, 3, head_dim, ...]."""
    sources: dict[str, list[str]] = {}
    for name in filter(is_base, model.shapes):
        # A model lists query, key and value in the order in which they are fused.
        sources.setdefault(hf_tensor(name, model.spec).name, []).append(name)
    config = _config(model) | {"dtype": dtype_name(dtype)}
    tensors = [_tensor(model, target, names) for target, names in sources.items()]
    if model.spec.residual is not None:  # a base that was widened before leaves as it came
        residual = replace(model.spec.residual, scale=scale_in(dtype))
        config |= residual_config(residual)
        tensors = [_stored(residual, names[0], tensor) for names, tensor in zip(sources.values(), tensors, strict=True)]
    return Export(format="stock", config=config, tensors=tensors, dtype=dtype)


def _stored(residual: StoredResidual, name: str, tensor: PlannedTensor) -> PlannedTensor:
    return replace(tensor, make=lambda: residual.store(name, tensor.make().clone()))


def _config(model: TrainedModel) -> dict[str, Any]:
    config = base_config(model.base.path)
    config["num_hidden_layers"] = model.spec.num_layers
    if "layer_types" in config:  # a list with an entry a layer; the bases that we read have one type only
        config["layer_types"] = config["layer_types"][:1] * model.spec.num_layers
    return config


def _tensor(model: TrainedModel, target: str, names: list[str]) -> PlannedTensor:
    rows, *columns = model.shapes[names[0]]
    if len(names) == 1:
        return PlannedTensor(target, (rows, *columns), partial(merged, model, names[0]))
    return PlannedTensor(target, (rows * len(names), *columns), partial(_fused, model, names))


def _fused(model: TrainedModel, names: list[str]) -> Tensor:
    heads = model.spec.widths.num_attention_heads
    return torch.stack([merged(model, name).unflatten(0, (heads, -1)) for name in names], dim=1).flatten(0, 2)


def merged(model: TrainedModel, name: str) -> Tensor:
    """The base parameter `name`, with the adapter that stands beside it, if any, in fp32: W + s B A."""
    weight, path = model.read(name), name.removesuffix("base.weight") + "adapter"
    if path not in model.adapters:
        return weight
    return weight.float() + model.adapters[path].scale * (model.read(f"{path}.b") @ model.read(f"{path}.a"))
