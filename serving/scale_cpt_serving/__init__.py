"""Registers models of scale-cpt's formats `scale` and `difference`, combinations of them, and those
on hosted bases: with transformers when it is imported, and those that vLLM runs with vLLM when it
asks.

`remote_code` holds the files that exported folders carry: here it is a link to them, in the built
package a copy.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from scale_cpt_serving.remote_code.configuration_difference import DifferenceConfig
from scale_cpt_serving.remote_code.configuration_scale import ScaleConfig
from scale_cpt_serving.remote_code.configuration_scale_combined import CombinedConfig
from scale_cpt_serving.remote_code.configuration_scale_hosted import HostedScaleConfig
from scale_cpt_serving.remote_code.modeling_difference import DifferenceForCausalLM
from scale_cpt_serving.remote_code.modeling_scale import ScaleForCausalLM
from scale_cpt_serving.remote_code.modeling_scale_combined import CombinedForCausalLM
from scale_cpt_serving.remote_code.modeling_scale_hosted import HostedScaleForCausalLM

__all__ = [
    "CombinedConfig",
    "CombinedForCausalLM",
    "DifferenceConfig",
    "DifferenceForCausalLM",
    "HostedScaleConfig",
    "HostedScaleForCausalLM",
    "ScaleConfig",
    "ScaleForCausalLM",
    "register",
]

for _config, _model in (
    (ScaleConfig, ScaleForCausalLM),
    (CombinedConfig, CombinedForCausalLM),
    (DifferenceConfig, DifferenceForCausalLM),
    (HostedScaleConfig, HostedScaleForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)


def register() -> None:
    """What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""
    from vllm import ModelRegistry

    # By name: vLLM imports the module in a process of its own to look at the class.
    ModelRegistry.register_model("ScaleForCausalLM", "scale_cpt_serving.vllm_model:ScaleForVllm")
