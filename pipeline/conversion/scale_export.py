"""The format `scale` on a base of a native family: the tensors as they were trained, and code."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.hf.base_files import base_config, text_token_ids
from pipeline.hf.config import gate_to_config, widened_to_config
from pipeline.hf.gate_tensors import gate_tensors
from pipeline.hf.own_row_tables import own_row_tables
from pipeline.hf.remote_code.configuration_scale import NEEDED, ScaleConfig
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.write import Export, PlannedTensor, code_files, dtype_name


def scale_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """Any SCALE model: its tensors as they were trained, and the files of code with which
    transformers runs them.
    """
    assert model.plan is not None, "checked before"
    config: dict[str, Any] = {
        "architectures": [ScaleForCausalLM.__name__],
        "auto_map": {
            "AutoConfig": "configuration_scale.ScaleConfig",
            "AutoModelForCausalLM": "modeling_scale.ScaleForCausalLM",
        },
        "model_type": ScaleConfig.model_type,
        **widened_to_config(model.spec, model.plan),
        "base_vocab_size": model.base.spec.vocab_size,
        "dtype": dtype_name(dtype),
        "transformers_version": NEEDED,
    }
    config |= text_token_ids(base_config(model.base.path))

    tensors: list[PlannedTensor] = []
    for name, shape in model.shapes.items():
        # Read when it is written: the model is never whole in memory.
        tensors.append(PlannedTensor(name, shape, partial(model.read, name)))
    tensors += own_row_tables(model.own_row_of)
    if model.gate is not None:
        config |= gate_to_config(model.gate)
        tensors += gate_tensors(model.gate, model.base.spec.vocab_size)
    return Export("scale", config, tensors, dtype, code_files(ScaleForCausalLM))
