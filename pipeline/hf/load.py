"""Loads a model from a Hugging Face folder as its users do: by transformers' Auto classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from pipeline.errors import BaseModelError, faults_of_library
from pipeline.files.json_files import read_object
from pipeline.hf.remote_code.configuration_difference import DifferenceConfig
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.remote_code.configuration_scale_combined import CombinedConfig
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from pipeline.hf.remote_code.modeling_difference import DifferenceForCausalLM
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.modeling_scale_combined import CombinedForCausalLM
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from pipeline.model.base_folder import files_by_tensor
from pipeline.model.families import FAMILIES
from pipeline.model.from_hf import loading_options

# Folders of the scale format are loaded with the package's own copy of the code that they carry.
OWN_MODELS: dict[Any, Any] = {
    ScaleConfig: ScaleForCausalLM,
    CombinedConfig: CombinedForCausalLM,
    DifferenceConfig: DifferenceForCausalLM,
    HostedScaleConfig: HostedScaleForCausalLM,
}
for _config, _model in OWN_MODELS.items():
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)
AutoModelForImageTextToText.register(HostedScaleConfig, HostedScaleForCausalLM, exist_ok=True)


def load_hf_model(
    folder: Path,
    dtype: torch.dtype | None = None,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Any:
    """The causal language model in `folder`, ready for inference; `dtype` None: in the type of its
    files.

    Raises:
        BaseModelError: the folder is missing or damaged, lacks weights, or needs code that the user
            does not trust.
    """
    values = check_hf_config(folder, trust_remote_code=trust_remote_code)
    files_by_tensor(folder)  # training must read the same weights
    options: dict[str, Any] = {}
    if values.get("model_type") in tuple(FAMILIES):
        options = loading_options(values)
    # Its bars would tear ours, and fill the log of a job.
    transformers.utils.logging.disable_progress_bar()
    with faults_of_library(f"{folder}: cannot be loaded by transformers", BaseModelError):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            # `auto` is the type of the files; without it transformers loads fp32, twice the memory.
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    # transformers fills what is missing with random numbers, and only warns.
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found[fault]:
            names = sorted(map(str, found[fault]))
            raise BaseModelError(
                f"{folder}: {fault.replace('_', ' ')}: {names[0]} and {len(names) - 1} more"
            )
    return model.to(device).eval()


def pop_eos_token_ids(model: Any) -> list[int]:
    """Every `eos_token_id` of the model's generation_config.json, as chat models have several; the
    rest is forgotten.

    `generate` fills what a given configuration leaves open from the model's own: Llama's, for one,
    lowers the temperature and cuts off the tail of the distribution.
    """
    ends = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig()
    return [ends] if isinstance(ends, int) else list(ends or ())


def check_hf_config(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Checks a model's folder before any weight is read, and returns the contents of its
    config.json.

    Raises:
        BaseModelError: it holds no model's config.json, or code that the user does not trust.
    """
    path = folder / "config.json"
    try:
        config = read_object(path, BaseModelError, "copy the folder again")
    except FileNotFoundError:
        raise BaseModelError(
            f"{path}: no such file; expected a Hugging Face model folder"
        ) from None
    # For these the package has code of its own, and does not look at the folder's.
    known = (*(own.model_type for own in OWN_MODELS), *FAMILIES)
    if config.get("auto_map") and config.get("model_type") not in known and not trust_remote_code:
        raise BaseModelError(
            f"{path}: needs the code in its folder; say --trust-remote-code if you trust its maker"
        )
    return config
