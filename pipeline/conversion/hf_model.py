"""Loading a Hugging Face folder as `transformers` does, ours included, without running code from the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.conversion.export import ADAPTER
from pipeline.conversion.modeling_scale import ScaleConfig, ScaleForCausalLM
from pipeline.errors import BaseModelError

# Folders of the scale format carry the code that this package has itself: it is used from here, not from there.
AutoConfig.register(ScaleConfig.model_type, ScaleConfig, exist_ok=True)
AutoModelForCausalLM.register(ScaleConfig, ScaleForCausalLM, exist_ok=True)


def load_hf_model(
    folder: Path, dtype: torch.dtype | None = None, *, device: str = "cpu", trust_remote_code: bool = False
) -> Any:  # noqa: ANN401
    """The causal language model in `folder`, ready for inference; in the type of its files where `dtype` is None.

    Raises:
        BaseModelError: the folder is missing or damaged, lacks weights, or needs code that the user does not trust.
    """
    check_hf_config(folder, trust_remote_code=trust_remote_code)
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BaseModelError(f"{folder}: cannot be loaded by transformers: {reason}") from None
    # transformers fills in what is missing with random numbers, and says so in a warning only.
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found[fault]:
            names = sorted(map(str, found[fault]))
            raise BaseModelError(f"{folder}: {fault.replace('_', ' ')}: {names[0]} and {len(names) - 1} more")
    return model.to(device).eval()


def load_exported(folder: Path, base: Path, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """A folder that a conversion wrote, as others load it: by transformers, or, where it holds adapters only, by PEFT
    beside the `base`."""
    if not (folder / ADAPTER.config).exists():
        return load_hf_model(folder, dtype)
    from peft import PeftModel  # only where adapters are written

    return PeftModel.from_pretrained(load_hf_model(base, dtype), str(folder)).eval()


def check_hf_config(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Says before any weight is read what would be wrong with a folder.

    Raises:
        BaseModelError: it holds no model's config.json, adapters alone, or code that the user does not trust.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / ADAPTER.config).exists():
            raise BaseModelError(
                f"{folder}: holds adapters without their base; expected a whole model: convert the checkpoint again "
                "with --format stock, which merges them"
            ) from None
        raise BaseModelError(f"{path}: no such file; expected a Hugging Face model folder") from None
    except ValueError as error:
        raise BaseModelError(f"{path}: not a model's config ({error}); copy the folder again") from None
    if config.get("auto_map") and config.get("model_type") != ScaleConfig.model_type and not trust_remote_code:
        raise BaseModelError(f"{path}: needs the code in its folder; say --trust-remote-code if you trust its maker")
