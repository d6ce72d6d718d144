"""`--format scale`: the parameters as they trained, beside the one file of code that runs them in `transformers`."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from pipeline.conversion import modeling_scale
from pipeline.conversion.export import Export, PlannedTensor
from pipeline.conversion.hf_config import base_config, dtype_name, token_ids
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan

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
