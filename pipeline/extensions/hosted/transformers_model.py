"""The model of transformers that is a hosted base: built without values, or loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from pipeline.errors import BaseModelError, faults_of_library
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.structure import UnsupportedStructureError
from pipeline.log import get_logger
from pipeline.model.from_hf import with_special_floats

_logger = get_logger(__name__)

_ALIGNED_BYTES = 16
"""What the strides of matrices in `torch.nn.functional.grouped_mm` must be a multiple of."""
DEQUANTIZED = ("fp8", "mxfp4")
"""Methods of quantization in a config.json that transformers undoes on a CPU while it loads."""


def hf_config_of(values: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' configuration of a base, from the entries of its config.json.

    It is that of dequantized weights, whatever the folder holds.
    """
    plain = with_special_floats(dict(values))
    plain.pop("quantization_config", None)
    config: PretrainedConfig = CONFIG_MAPPING[plain["model_type"]].from_dict(plain)
    return config


def model_class_of(config: PretrainedConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """The class that transformers builds for a base, and the configuration that it takes.

    It is the causal one where there is one; of a multimodal model with a class for its text part,
    that class with the text part's configuration.

    Raises:
        UnsupportedStructureError: transformers itself has no such class.
    """
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) not in mapping:
            continue
        model_class = mapping[type(config)]
        if isinstance(model_class, tuple):
            model_class = model_class[0]
        text_class = config.sub_configs.get("text_config")
        if text_class is not None and getattr(model_class, "config_class", None) == text_class:
            return model_class, config.get_text_config()
        return model_class, config
    raise UnsupportedStructureError(
        f"model_type {config.model_type!r:.80}: transformers has no class of its own for its "
        "causal language model, and code of a model's folder is not run; use a base of another type"
    )


def first_entry(config: PretrainedConfig, *names: str) -> Any:  # whatever the config holds
    """The first of these entries that the configuration has; None if it has none."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def hosted_config(spec: HostedSpec) -> PretrainedConfig:
    """transformers' configuration of the class that is built."""
    return model_class_of(hf_config_of(spec.config))[1]


def build_base(spec: HostedSpec) -> nn.Module:
    """The base in torch's default dtype, frozen and in evaluation mode; its values are unset."""
    dtype = torch.get_default_dtype()
    model_class = getattr(transformers, spec.structure.model_class)
    options: dict[str, Any] = {"dtype": dtype}
    if dtype == torch.float64:
        # The verification of an export in fp32 runs the base in fp64, which the products over all
        # experts at once do not take.
        options["experts_implementation"] = "eager"
    with no_init_weights():
        model: Any = model_class._from_config(hosted_config(spec), **options)
    model.tie_weights()  # part of the initialisation that was left out
    return model.requires_grad_(False).eval()


@cache
def dtype_unsupported_reason(spec: HostedSpec, dtype: torch.dtype) -> str | None:
    """Why a model of `dtype` cannot be this base, as a clause about the base; None: it can be."""
    with torch.device("meta"):
        model: Any = build_base(spec)
    name = _parameter_kept_in_fp32(model, dtype)
    if name is not None:
        return f"of which transformers keeps {name} in fp32"
    experts = _unaligned_experts(model, dtype)
    if experts is not None:
        name, sizes = experts
        return (
            f"whose experts {name} have matrices of {sizes[0]} x {sizes[1]}, and torch multiplies "
            f"all experts at once only by rows and columns of multiples of {_ALIGNED_BYTES} bytes"
        )
    return None


def _parameter_kept_in_fp32(model: Any, dtype: torch.dtype) -> str | None:
    """The first parameter that transformers keeps in fp32 in a model of `dtype`; None: there is
    none."""
    if dtype.itemsize > 2:
        return None
    names = list(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        # Which the library adds for values that only bf16 holds (`_get_dtype_plan`).
        names += model._keep_in_fp32_modules or ()
    # As transformers' loader reads these names: `*` is any text, and a part of the name is enough.
    patterns = [name.replace("*", ".*") for name in names]
    for name, _ in model.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            return str(name)
    return None


def _unaligned_experts(model: Any, dtype: torch.dtype) -> tuple[str, tuple[int, int]] | None:
    """The first weights of experts that torch's grouped product refuses in `dtype`, and the sizes
    of each expert's matrix; None: it takes all, or is not asked."""
    if dtype == torch.float64:
        return None  # `build_base`
    for module_name, module in model.named_modules():
        # Only classes whose forward the library may replace by the grouped product have it.
        if not hasattr(module, "_apply_gate"):
            continue
        if module.config._experts_implementation != "grouped_mm":
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() != 3:
                continue
            _, rows, columns = parameter.shape
            # Both: the product for the input's gradient reads the transpose.
            if rows * dtype.itemsize % _ALIGNED_BYTES or columns * dtype.itemsize % _ALIGNED_BYTES:
                return f"{module_name}.{name}", (rows, columns)
    return None


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """The sizes of a linear map's input and output; None: the module is none."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None


def load_whole_base(folder: Path, spec: HostedSpec, dtype: torch.dtype) -> nn.Module:
    """The base as any user loads it, on the CPU; quantized weights are dequantized to `dtype`.

    Raises:
        BaseModelError: transformers cannot load the folder, or its weights do not fit config.json.
    """
    model_class = getattr(transformers, spec.structure.model_class)
    config = hosted_config(spec)
    if spec.quantization is not None:
        wanted = str(dtype).removeprefix("torch.")
        _logger.info("%s: %s weights, dequantized to %s", folder, spec.quantization, wanted)
        # As an entry of the configuration: transformers' option for it would also replace the
        # folder's list of modules that are not quantized.
        config.quantization_config = {**spec.config["quantization_config"], "dequantize": True}
    # Its bars would tear ours, and fill the log of a job.
    transformers.utils.logging.disable_progress_bar()
    with faults_of_library(f"{folder}: cannot be loaded by transformers", BaseModelError):
        model, found = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    _check_all_loaded(folder, spec, found)
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def _check_all_loaded(folder: Path, spec: HostedSpec, found: Mapping[str, Any]) -> None:
    """Checks that every weight of the model was in the files, in its shape.

    transformers fills what is missing with random numbers, and only warns.

    Args:
        folder: the base's.
        spec: the base.
        found: what `from_pretrained` says of the names that it read.

    Raises:
        BaseModelError: a weight was not.
    """
    unread = sorted(map(str, found["unexpected_keys"]))
    missing = sorted(map(str, found["missing_keys"]))
    if missing and unread:
        raise BaseModelError(
            f"{folder}: expected the weights of {spec.structure.model_class}, which transformers "
            f"has for model_type {spec.family}; found those of another class: {missing[0]} and "
            f"{len(missing) - 1} more are missing, and {unread[0]} and {len(unread) - 1} more are "
            "none of its; use a base of another type"
        )
    for fault in ("missing_keys", "mismatched_keys"):
        if found[fault]:
            names = sorted(map(str, found[fault]))
            raise BaseModelError(
                f"{folder}: {fault.replace('_', ' ')}: {names[0]} and {len(names) - 1} more; the "
                "weights do not fit config.json: copy the folder again"
            )
