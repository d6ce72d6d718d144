"""A model of the base's own architecture, under the base's own tensor names.

Full fine-tuning and Freeze make one, LLaMA Pro makes one with more layers, and LoRA once its adapters are merged.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pipeline.config.method import Lora
from pipeline.conversion import modeling_scale
from pipeline.conversion.hf_folder import (
    ADAPTER,
    Export,
    PlannedTensor,
    base_config,
    dtype_name,
    residual_config,
    token_ids,
)
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.model.base_folder import FUSED_PARTS, hf_tensor
from pipeline.model.from_hf import is_base
from pipeline.model.spec import DecoderSpec, StoredResidual, scale_in
from pipeline.scale.plan import ExpansionPlan


def ordinary_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """The inverse of `model.hf_names`: GPT-NeoX's query, key and value become one tensor [heads, 3, head_dim, ...]."""
    sources: dict[str, list[str]] = {}
    for name in filter(is_base, model.shapes):
        # A model lists query, key and value in the order in which they are fused.
        sources.setdefault(hf_tensor(name, model.spec).name, []).append(name)
    config = _ordinary_config(model) | {"dtype": dtype_name(dtype)}
    tensors = [_tensor(model, target, names) for target, names in sources.items()]
    if model.spec.residual is not None:  # a base that was widened before leaves as it came
        residual = replace(model.spec.residual, scale=scale_in(dtype))
        config |= residual_config(residual)
        tensors = [_stored(residual, names[0], tensor) for names, tensor in zip(sources.values(), tensors, strict=True)]
    return Export(format="stock", config=config, tensors=tensors, dtype=dtype)


def _stored(residual: StoredResidual, name: str, tensor: PlannedTensor) -> PlannedTensor:
    return replace(tensor, make=lambda: residual.store(name, tensor.make().clone()))


def _ordinary_config(model: TrainedModel) -> dict[str, Any]:
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


# --- `--format scale`: the parameters as they trained, beside the one file of code that runs them in `transformers` ---

CODE_FILE = "modeling_scale.py"


def scale_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """Any SCALE model, of any family.

    Raises:
        ConversionError: the base was not widened.
    """
    if model.plan is None:
        method = model.settings.name
        raise ConversionError(f"{model.checkpoint}: method {method} widens nothing; convert it with --format stock")
    return Export(
        format="scale",
        config={
            "architectures": ["ScaleForCausalLM"],
            "auto_map": {
                "AutoConfig": "modeling_scale.ScaleConfig",
                "AutoModelForCausalLM": "modeling_scale.ScaleForCausalLM",
            },
            "model_type": modeling_scale.ScaleConfig.model_type,
            **_architecture(model.spec, model.plan),
            **token_ids(base_config(model.base.path)),
            "dtype": dtype_name(dtype),
        },
        tensors=[PlannedTensor(name, shape, partial(model.read, name)) for name, shape in model.shapes.items()],
        dtype=dtype,
        code={CODE_FILE: inspect.getsource(modeling_scale)},
    )


def _architecture(spec: DecoderSpec, plan: ExpansionPlan) -> dict[str, Any]:
    """The fields of `modeling_scale.ScaleConfig`."""
    described = asdict(spec)
    widths, rotary = described.pop("widths"), described.pop("rotary")
    renamed = {"activation": "hidden_act", "num_layers": "num_hidden_layers"}
    left_out = ("family", "residual")
    described = {renamed.get(key, key): value for key, value in described.items() if key not in left_out}
    return {
        **described,
        "normed_size": spec.normed_size,
        **widths,
        **{f"expansion_{key}": value for key, value in asdict(plan.expansion).items()},
        "rotary": rotary,
        "l_fp": plan.l_fp,
        "collaborative_modules": sorted(plan.collaborative_modules),
        "routed": plan.routed,
        "router_threshold": plan.router_threshold,
        "norm_statistics": plan.norm,
    }


# --- `--format peft`: LoRA's adapters in the format of the package PEFT, which puts them beside the base again ------
# Where query, key and value are one map in the base's folder (GPT-NeoX), our adapters of rank r beside k of them are
# one of rank k r, whose alpha grows with it: its A holds theirs one below the other, and in its B the rows that
# belong to one of the three are zero but for the columns of that one's A.

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
    return Export("peft", _peft_config(model, model.settings, maps), tensors, dtype, files=ADAPTER)


def _maps(model: TrainedModel) -> dict[str, PeftMap]:
    maps: dict[str, PeftMap] = {}
    for path in model.adapters:
        target = hf_tensor(path.removesuffix("adapter") + "base.weight", model.spec)
        one = maps.setdefault(target.name, PeftMap(target.name.removesuffix(".weight")))
        one.adapters[target.fused_part or 0] = path
        one.fused = target.fused_part is not None
    return maps


def _peft_config(model: TrainedModel, settings: Lora, maps: Mapping[str, PeftMap]) -> dict[str, Any]:
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
