"""Registers models of scale-cpt's format `scale`: with transformers when it is imported, with vLLM when vLLM asks.

`modeling_scale.py` and `modeling_scale_combined.py` are the files that exported folders carry: here links to them, in
the built package the files themselves.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from scale_cpt_serving.modeling_scale import ScaleConfig, ScaleForCausalLM
from scale_cpt_serving.modeling_scale_combined import CombinedConfig, CombinedForCausalLM

__all__ = ["CombinedConfig", "CombinedForCausalLM", "ScaleConfig", "ScaleForCausalLM", "register"]

for _config, _model in ((ScaleConfig, ScaleForCausalLM), (CombinedConfig, CombinedForCausalLM)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)


def register() -> None:
    """What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""
    from vllm import ModelRegistry

    # By name: vLLM imports the module in a process of its own to look at the class.
    ModelRegistry.register_model("ScaleForCausalLM", "scale_cpt_serving.vllm_model:ScaleForVllm")
