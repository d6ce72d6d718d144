"""Full fine-tuning's result: a model of the base's own architecture, under the base's own tensor names."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pipeline.conversion.export import Export, PlannedTensor
from pipeline.conversion.hf_config import base_config, dtype_name
from pipeline.conversion.trained_model import TrainedModel
from pipeline.model.hf_names import hf_tensor


def ordinary_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """The inverse of `model.hf_names`: GPT-NeoX's query, key and value become one tensor [heads, 3, head_dim, ...]."""
    sources: dict[str, list[str]] = {}
    for name in model.shapes:
        # A model lists query, key and value in the order in which they are fused.
        sources.setdefault(hf_tensor(name, model.spec).name, []).append(name)
    return Export(
        format="stock",
        config=base_config(model.base.path) | {"dtype": dtype_name(dtype)},
        tensors=[_tensor(model, target, names) for target, names in sources.items()],
        dtype=dtype,
    )


def _tensor(model: TrainedModel, target: str, names: list[str]) -> PlannedTensor:
    rows, *columns = model.shapes[names[0]]
    if len(names) == 1:
        return PlannedTensor(target, (rows, *columns), partial(model.read, names[0]))
    return PlannedTensor(target, (rows * len(names), *columns), partial(_fused, model, names))


def _fused(model: TrainedModel, names: list[str]) -> Tensor:
    heads = model.spec.widths.num_attention_heads
    return torch.stack([model.read(name).unflatten(0, (heads, -1)) for name in names], dim=1).flatten(0, 2)
