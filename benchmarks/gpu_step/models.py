"""The models that are measured: this project's, and those of transformers and PEFT."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_step.shapes import Shape
from benchmarks.gpu_step.variants import Variant
from benchmarks.results import eighth_of
from pipeline.config.base import BasePrecision
from pipeline.config.method import FullFineTuning, LlamaPro, Lora, Method, ScaleMethod
from pipeline.methods.build_model import quantize_base
from pipeline.methods.registry import method_for
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameters import quantization_of
from pipeline.parallel.topology import SINGLE

# Settings of variants that have open weights beside Adapt's width.
OWN_WEIGHTS: dict[str, dict[str, Any]] = {
    "adapt_own": {"open_rows": {"min_count": 1}, "open_gains": True},
    "adapt_low_rank": {"low_rank": 16},
}
LIGER_PACKAGES = ("liger_kernel", "triton")


def our_method(method: str, spec: DecoderSpec, l_fp: int) -> Method:
    """The settings of `method` in the paper's proportions."""
    if method == "fft":
        return FullFineTuning(name="fft")
    if method in ("lora", "lora_16"):
        return Lora(name="lora", rank=_lora_rank(method, spec.widths.hidden_size))
    if method == "llama_pro":
        # As in the paper, which adds 4 blocks to the 16 of Llama 3.2 1B.
        return LlamaPro(name="llama_pro", added_layers=max(1, spec.num_layers // 4))

    settings: dict[str, Any] = {"name": "scale", "expansion": eighth_of(spec)}
    if method in OWN_WEIGHTS:
        settings["variant"] = "adapt"
        settings |= OWN_WEIGHTS[method]
    else:
        settings["variant"] = method
    if method != "preserve":
        # Preserve has no W12 in any layer, and so no layer at which it would begin.
        settings["l_fp"] = l_fp
    return ScaleMethod.model_validate(settings)


def _lora_rank(method: str, hidden_size: int) -> int:
    """The rank of `lora` or `peft_lora`, or 16 for those that end in `_16`."""
    if method.endswith("_16"):
        return 16
    # The paper's rank, 256 for Llama 3.2 1B's hidden size of 2,048.
    return hidden_size // 8


def our_model(
    method: str, spec: DecoderSpec, l_fp: int, base: BasePrecision = "bf16"
) -> CausalDecoder:
    """This project's model for `method`, its parameters unset."""
    # As if these tokens were frequent in the new text; methods without own rows ignore it.
    own_tokens = tuple(range(0, spec.vocab_size, 4))
    settings = our_method(method, spec, l_fp)
    training = method_for(settings, Path(), 0, own_tokens)
    # "none": without activation checkpointing.
    model = training.build(spec, SINGLE, "none")
    if base != "bf16":
        quantize_base(model, base)
    return model


def their_model(variant: Variant, shape: Shape, device: torch.device) -> nn.Module:
    """The model of transformers, with PEFT's adapters on every linear map for `peft_lora…`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        shape.architecture, local_files_only=True, trust_remote_code=False
    )
    # Training reads no cache, and filling one would take time and memory.
    config.use_cache = False
    # The fastest attention that users of transformers have on this machine.
    has_flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if has_flash else "sdpa"
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.get_default_dtype(), attn_implementation=attention
    )
    if variant.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    # Before PEFT wraps the model, under which the layers have another name.
    layers = model.get_submodule("model.layers")
    if variant.method.startswith("peft_lora"):
        from peft import LoraConfig, get_peft_model

        rank = _lora_rank(variant.method, config.hidden_size)
        adapters = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        # By default PEFT would keep adapters in fp32: here the optimizer has the fp32 masters.
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    if variant.compiled:
        for layer in layers.children():
            layer.compile(backend=compiler(device))
    return model


def compiler(device: torch.device) -> str:
    """The backend of torch.compile.

    On a CPU, where compiled layers are tried and not measured, it is one that generates no code.
    """
    return "inductor" if device.type == "cuda" else "eager"


@torch.no_grad()
def set_randomly(parameter: Tensor) -> None:
    """Sets a matrix, quantised or not, to small random values, and a norm's gain to 1."""
    quantization = quantization_of(parameter)
    if quantization is not None:
        shape = (quantization.rows, quantization.columns)
        values = torch.randn(shape, device=parameter.device)
        quantization.write(parameter, 0.02 * values)
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        # 0.02 is the deviation with which transformers begins a Llama.
        parameter.normal_(std=0.02)
