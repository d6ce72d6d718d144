"""What each `--format` writes. `merged` has a module of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import Method
from pipeline.conversion import Format, Purpose
from pipeline.conversion.merged import merged_export
from pipeline.errors import ConversionError
from pipeline.gating.gate import NUMBERS
from pipeline.hf import Exported
from pipeline.hf.folder import Export, PlannedTensor, base_config, code_files, dtype_name
from pipeline.hf.remote_code.configuration_scale import NEEDED, ScaleConfig
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.model.merged_model import merged_unsupported_reason
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan
from pipeline.scale_math import GATE_DECAY


def unsupported_reason(
    settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
) -> dict[Exported, str | None]:
    """Why a model cannot leave in each format; None where it can."""
    unwidened = f"method {settings.name} widens nothing" if plan is None else None
    return {
        "merged": merged_unsupported_reason(plan, spec, gated=gated),
        "scale": unwidened,
        "expansion": unwidened,
    }


def describe_formats(reasons: Mapping[Exported, str | None]) -> str:
    """The formats in which a model can leave, and the reasons against the others, in one line."""
    others = (f"not {format}: {reason}" for format, reason in reasons.items() if reason is not None)
    return "; ".join(
        [", ".join(format for format, reason in reasons.items() if reason is None), *others]
    )


def choose_export(
    model: TrainedModel, format: Format, dtype: torch.dtype, purpose: Purpose = "serving"
) -> Export:
    """The folder's contents; `auto` is `merged` if that can express the model, else `scale`.

    Raises ConversionError: `format` cannot express the model, or it holds no whole model.
    """
    if check_format(model, format) == "merged":
        return merged_export(model, dtype, purpose)
    return scale_export(model, dtype)


def check_format(model: TrainedModel, format: Format) -> Exported:
    """The format in which the model leaves, if `format` is asked for. Raises ConversionError if it cannot leave so."""
    reasons = unsupported_reason(
        model.settings, model.plan, model.stored.spec, gated=model.gate is not None
    )
    if format == "auto":
        return "merged" if reasons["merged"] is None else "scale"
    if reasons[format] is not None:
        raise ConversionError(
            f"{model.checkpoint}: cannot leave as --format {format}, but as {describe_formats(reasons)}"
        )
    return format


def scale_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """Any SCALE model: the parameters as they trained, and the file of code that runs them in `transformers`."""
    base, spec, plan, gate = base_config(model.base.path), model.spec, model.plan, model.gate
    assert plan is not None, "checked before"
    renamed_or_unused = ("family", "residual", "widths", "activation", "layers", "new_tokens")
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
        "layer_types": [
            "full_attention" if layer.window is None else "sliding_attention"
            for layer in spec.layers
        ],
        "sliding_window": next(
            (layer.window for layer in spec.layers if layer.window is not None), None
        ),
        "expert_layers": [index for index, layer in enumerate(spec.layers) if layer.has_experts],
        "rotary": [asdict(one) for one in rotary],
        "layer_rotary": [
            None if layer.rotary is None else rotary.index(layer.rotary) for layer in spec.layers
        ],
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
        **{
            key: base[key]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if key in base
        },
        "dtype": dtype_name(dtype),
        "transformers_version": NEEDED,
    }
    tensors = [
        PlannedTensor(name, shape, partial(model.read, name))
        for name, shape in model.shapes.items()
    ]
    if gate is not None:
        config |= {
            "gate_decay": GATE_DECAY,
            **{f"gate_{name}": getattr(gate, name) for name in NUMBERS},
        }
        # In fp32 whatever the rest is: 16 bits would change decisions.
        tensors += [
            PlannedTensor(
                f"token_gate.{name}",
                tuple(tensor.shape),
                partial(torch.clone, tensor),
                torch.float32,
            )
            for name, tensor in gate.tensors.items()
        ]
    return Export("scale", config, tensors, dtype, code_files(ScaleForCausalLM))
