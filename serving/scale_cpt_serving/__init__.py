"""Registers models of scale-cpt's format `scale`: with transformers when it is imported, with vLLM when vLLM asks.

`modeling_scale.py` is the file that exported folders carry: here a link to it, in the built package the file itself.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from scale_cpt_serving.modeling_scale import ScaleConfig, ScaleForCausalLM

__all__ = ["ScaleConfig", "ScaleForCausalLM", "register"]

AutoConfig.register(ScaleConfig.model_type, ScaleConfig, exist_ok=True)
AutoModelForCausalLM.register(ScaleConfig, ScaleForCausalLM, exist_ok=True)


def register() -> None:
    """What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""
    from vllm import ModelRegistry

    # By name: vLLM imports the module in a process of its own to look at the class.
    ModelRegistry.register_model("ScaleForCausalLM", "scale_cpt_serving.vllm_model:ScaleForVllm")
