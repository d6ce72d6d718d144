"""What each `--format` writes. `stock` has a module of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.config.method import Lora, Method
from pipeline.conversion import Exported, Format
from pipeline.conversion.hf_folder import Export, PlannedTensor, base_config, code_files, dtype_name
from pipeline.conversion.remote_code.configuration_scale import NEEDED, ScaleConfig
from pipeline.conversion.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.conversion.stock import stock_export
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.model.families import hf_tensor
from pipeline.model.family import FusedPart
from pipeline.model.spec import DecoderSpec
from pipeline.model.stock_model import UNPADDED, Padding, why_not_stock
from pipeline.scale.gate import DECAY, NUMBERS
from pipeline.scale.plan import ExpansionPlan

_FFN = {"gate", "up", "down"}


def why_not(
    settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
) -> dict[Exported, str | None]:
    """Why a model cannot leave in each format; None where it can."""
    unwidened = f"method {settings.name} widens nothing" if plan is None else None
    peft = None
    if not isinstance(settings, Lora):
        peft = f"method {settings.name} has no adapters"
    elif spec.new_rows:
        peft = "adapters alone lack the rows of its new pieces"
    elif _has_ffn_beside_experts(spec) and _FFN & {*(settings.target_modules or _FFN)}:
        peft = "PEFT takes its layers' FFNs without routers for experts; adapters of attention alone can leave so"
    return {
        "stock": why_not_stock(plan, spec, gated=gated),
        "scale": unwidened,
        "peft": peft,
        "expansion": unwidened,
    }


def _has_ffn_beside_experts(spec: DecoderSpec) -> bool:
    shared = spec.mixture is not None and spec.mixture.shared_size > 0
    return shared or len({layer.has_experts for layer in spec.layers}) > 1


def describe_formats(reasons: Mapping[Exported, str | None]) -> str:
    """The formats in which a model can leave, and the reasons against the others, in one line."""
    others = (f"not {format}: {reason}" for format, reason in reasons.items() if reason is not None)
    return "; ".join([", ".join(format for format, reason in reasons.items() if reason is None), *others])


def choose_export(
    model: TrainedModel,
    format: Format,
    dtype: torch.dtype,
    padding: Padding = UNPADDED,
    base_name: str | None = None,
) -> Export:
    """The folder's contents; `auto` is `stock` if that can express the model, else `scale`.

    Adapters name their base: by `base_name`, its name on the hub, or else by its path here.

    Raises:
        ConversionError: `format` cannot express the model, or it holds no whole model.
    """
    chosen = check_format(model, format)
    if chosen == "stock":
        return stock_export(model, dtype, padding)
    if padding != UNPADDED:
        raise ConversionError(f"{model.checkpoint}: --pad-for is for an export in the format stock; leave it out")
    return peft_export(model, dtype, base_name) if chosen == "peft" else scale_export(model, dtype)


def check_format(model: TrainedModel, format: Format) -> Exported:
    """The format in which the model leaves, if `format` is asked for. Raises ConversionError if it cannot leave so."""
    reasons = why_not(model.settings, model.plan, model.stored.spec, gated=model.gate is not None)
    if format == "auto":
        return "stock" if reasons["stock"] is None else "scale"
    if reasons[format] is not None:
        raise ConversionError(
            f"{model.checkpoint}: cannot leave as --format {format}, but as {describe_formats(reasons)}"
        )
    return format


def scale_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """Any SCALE model: the parameters as they trained, and the file of code that runs them in `transformers`."""
    base, spec, plan, gate = base_config(model.base.path), model.spec, model.plan, model.gate
    assert plan is not None, "checked before"
    renamed_or_unused = ("family", "residual", "widths", "activation", "layers", "new_rows")
    rotary = list(dict.fromkeys(layer.rotary for layer in spec.layers if layer.rotary is not None))
    config: dict[str, Any] = {
        "architectures": ["ScaleForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_scale.ScaleConfig",
            "AutoModelForCausalLM": "modeling_scale.ScaleForCausalLM",
        },
        "model_type": ScaleConfig.model_type,
        **{key: value for key, value in asdict(spec).items() if key not in renamed_or_unused},
        **asdict(spec.widths),
        "hidden_act": spec.activation,
        "num_hidden_layers": spec.num_layers,
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers],
        "sliding_window": next((layer.window for layer in spec.layers if layer.window is not None), None),
        "expert_layers": [index for index, layer in enumerate(spec.layers) if layer.has_experts],
        "rotary": [asdict(one) for one in rotary],
        "layer_rotary": [None if layer.rotary is None else rotary.index(layer.rotary) for layer in spec.layers],
        "normed_size": None if spec.residual is None else spec.residual.normed_size,
        "rest_scale": 0.0 if spec.residual is None else spec.residual.scale,
        **{f"expansion_{key}": value for key, value in asdict(plan.expansion).items()},
        # Caches are sized by all heads.
        "num_attention_heads": spec.widths.num_attention_heads + plan.expansion.num_attention_heads,
        "num_key_value_heads": spec.widths.num_key_value_heads + plan.expansion.num_key_value_heads,
        "l_fp": plan.l_fp,
        "collaborative_modules": sorted(plan.collaborative_modules),
        "routed": plan.routed,
        "router_threshold": plan.router_threshold,
        "base_vocab_size": model.base.spec.vocab_size,
        "norm_statistics": plan.norm,
        **{key: base[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in base},
        "dtype": dtype_name(dtype),
        "transformers_version": NEEDED,
    }
    tensors = [PlannedTensor(name, shape, partial(model.read, name)) for name, shape in model.shapes.items()]
    if gate is not None:
        config |= {"gate_decay": DECAY, **{f"gate_{name}": getattr(gate, name) for name in NUMBERS}}
        # In fp32 whatever the rest is: 16 bits would change decisions.
        tensors += [
            PlannedTensor(f"token_gate.{name}", tuple(tensor.shape), partial(torch.clone, tensor), torch.float32)
            for name, tensor in gate.tensors.items()
        ]
    return Export("scale", config, tensors, dtype, code_files(ScaleForCausalLM))


def peft_export(model: TrainedModel, dtype: torch.dtype, base_name: str | None = None) -> Export:
    """The adapters, and the configuration that PEFT reads.

    If several of our maps are one in the base's folder (GPT-NeoX, Phi-3), our adapters of rank r for k of them become
    one adapter of rank k r, and its alpha grows with it. Its A is theirs stacked; in its B, the rows of each map are
    zero except in the columns that belong to its own A.

    Raises:
        ConversionError: PEFT is not installed to verify what is written.
    """
    settings = model.settings
    assert isinstance(settings, Lora), "checked before"
    if find_spec("peft") is None:
        raise ConversionError("--format peft: its result is verified with the package peft: pip install peft")
    maps: dict[str, dict[FusedPart | None, str]] = {}  # by map of the base's folder, and its part where fused
    for path in model.adapters:
        target = hf_tensor(path.removesuffix("adapter") + "base.weight", model.spec)
        maps.setdefault(target.name.removesuffix(".weight"), {})[target.part] = path
    # PEFT knows the maps of all layers by the last part of their names.
    adapters = {name.rsplit(".", 1)[-1]: len(paths) for name, paths in maps.items()}
    several = {leaf: count for leaf, count in adapters.items() if count > 1}
    alpha = settings.scale * settings.rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name or str(model.base.path.resolve()),
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(adapters),
        "rank_pattern": {leaf: count * settings.rank for leaf, count in several.items()},
        "alpha_pattern": {leaf: count * alpha for leaf, count in several.items()},
    }

    def stored(path: str, factor: Literal["a", "b"]) -> Tensor:
        values, residual = model.read(f"{path}.{factor}"), model.spec.residual
        weight = path.removesuffix("adapter") + "base.weight"
        return values if residual is None else residual.store_factor(weight, factor, values)

    def fused_b(paths: Mapping[FusedPart | None, str], rows: int, rank: int) -> Tensor:
        fused = torch.zeros(rows, rank * len(paths))
        for index, (part, path) in enumerate(paths.items()):
            block = stored(path, "b")
            if part is None:
                return block
            groups = fused.view(part.groups, part.group_rows, -1)[:, part.first : part.first + part.rows]
            groups[..., index * rank : (index + 1) * rank] = block.unflatten(0, (part.groups, part.rows))
        return fused

    def stacked_a(paths: Mapping[FusedPart | None, str]) -> Tensor:
        return torch.cat([stored(path, "a") for path in paths.values()])

    tensors = []
    for name, paths in maps.items():
        part, first = next(iter(paths.items()))
        (rank, columns), (rows, _) = model.shapes[f"{first}.a"], model.shapes[f"{first}.b"]
        rows = rows if part is None else part.groups * part.group_rows
        a, b = (f"base_model.model.{name}.lora_{which}.weight" for which in "AB")
        tensors.append(PlannedTensor(a, (rank * len(paths), columns), partial(stacked_a, paths)))
        tensors.append(PlannedTensor(b, (rows, rank * len(paths)), partial(fused_b, paths, rows, rank)))
    return Export("peft", config, tensors, dtype)
