"""`--format peft`: LoRA's adapters in the format of the package PEFT, which puts them beside the base again.

Where query, key and value are one map in the base's folder (GPT-NeoX), our adapters of rank r beside k of them are one
of rank k r, whose alpha grows with it: its A holds theirs one below the other, and in its B the rows that belong to one
of the three are zero but for the columns of that one's A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pipeline.config.method import Lora
from pipeline.conversion.export import ADAPTER, Export, PlannedTensor
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.model.hf_names import FUSED_PARTS, hf_tensor

_PREFIX = "base_model.model."


@dataclass
class PeftMap:
    """A linear map of the base's folder, and the paths of our adapters for it, by their place in it (0 if alone)."""

    name: str
    adapters: dict[int, str] = field(default_factory=dict)
    fused: bool = False

    @property
    def leaf(self) -> str:
        """The last part of the name, by which PEFT knows maps of all layers."""
        return self.name.rsplit(".", 1)[-1]


def peft_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """The adapters, and the configuration that `peft` reads.

    Raises:
        ConversionError: the model has no adapters, or its base was widened before, or PEFT is not installed to verify
            what is written.
    """
    if not isinstance(model.settings, Lora):
        raise ConversionError(
            f"{model.checkpoint}: --format peft holds LoRA's adapters, and method {model.settings.name} has none; "
            "use --format auto"
        )
    if model.spec.residual is not None:
        raise ConversionError(
            f"{model.checkpoint}: --format peft: its base was widened before, and stores what was added scaled, where "
            "PEFT would put the adapters unscaled; use --format stock, which merges them"
        )
    if find_spec("peft") is None:
        raise ConversionError("--format peft: its result is verified with the package peft: pip install peft")
    maps = _maps(model)
    tensors = [tensor for one in maps.values() for tensor in _tensors(model, one)]
    return Export("peft", _config(model, model.settings, maps), tensors, dtype, files=ADAPTER)


def _maps(model: TrainedModel) -> dict[str, PeftMap]:
    maps: dict[str, PeftMap] = {}
    for path in model.adapters:
        target = hf_tensor(path.removesuffix("adapter") + "base.weight", model.spec)
        one = maps.setdefault(target.name, PeftMap(target.name.removesuffix(".weight")))
        one.adapters[target.fused_part or 0] = path
        one.fused = target.fused_part is not None
    return maps


def _config(model: TrainedModel, settings: Lora, maps: Mapping[str, PeftMap]) -> dict[str, Any]:
    several = {one.leaf: len(one.adapters) for one in maps.values() if len(one.adapters) > 1}
    alpha = settings.scale * settings.rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.base.path),
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({one.leaf for one in maps.values()}),
        "rank_pattern": {leaf: count * settings.rank for leaf, count in several.items()},
        "alpha_pattern": {leaf: count * alpha for leaf, count in several.items()},
    }


def _tensors(model: TrainedModel, one: PeftMap) -> list[PlannedTensor]:
    paths = list(one.adapters.values())
    rank, columns = model.shapes[f"{paths[0]}.a"]
    rows, _ = model.shapes[f"{paths[0]}.b"]
    rank, rows = rank * len(paths), rows * (len(FUSED_PARTS) if one.fused else 1)
    return [
        PlannedTensor(f"{_PREFIX}{one.name}.lora_A.weight", (rank, columns), partial(_a, model, one)),
        PlannedTensor(f"{_PREFIX}{one.name}.lora_B.weight", (rows, rank), partial(_b, model, one)),
    ]


def _a(model: TrainedModel, one: PeftMap) -> Tensor:
    return torch.cat([model.read(f"{path}.a") for path in one.adapters.values()])


def _b(model: TrainedModel, one: PeftMap) -> Tensor:
    blocks = {part: model.read(f"{path}.b") for part, path in one.adapters.items()}
    if not one.fused:
        return blocks[0]
    rows, rank = blocks[next(iter(blocks))].shape
    heads = model.spec.widths.num_attention_heads
    fused = torch.zeros(heads, len(FUSED_PARTS), rows // heads, rank * len(blocks))
    for index, (part, block) in enumerate(blocks.items()):
        fused[:, part, :, index * rank : (index + 1) * rank] = block.unflatten(0, (heads, -1))
    return fused.flatten(0, 2)
