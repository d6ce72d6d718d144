"""The logits of a base by this package, compared with those by transformers from the same folder.

The preservation check before the first step compares a model with this package's own base, so that
it cannot find a misread config.json.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pipeline import log
from pipeline.conversion.probe_texts import windows_of
from pipeline.errors import BaseModelError, faults_of_library
from pipeline.hf.base_files import base_config
from pipeline.hf.probe_texts import PROBE_TEXTS
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.families import family_of
from pipeline.model.from_hf import check_weights, loading_options
from pipeline.model.spec import DecoderSpec
from pipeline.model.streaming import stream_weights

LARGEST_BYTES = 8 * 2**30
"""The most that the model of transformers may take, in fp32.

Of a larger base, only the first layers that fit are compared.
"""
TOLERANCE = 1e-4
"""The largest difference of a logit, relative to the largest logit where that is above 1."""

_logger = log.get_logger(__name__)


@torch.no_grad()
def check_against_transformers(base: BaseFolder, largest_bytes: int = LARGEST_BYTES) -> None:
    """Compares the logits on a probe text, in fp32 on the CPU.

    Our model is read module by module. The model of transformers is in memory whole.

    Raises:
        BaseModelError: The logits differ, the weights do not fit config.json, or transformers
            cannot load the folder.
    """
    with torch.device("meta"):
        whole = Decoder(base.spec)
    check_weights(whole, base)
    layers = _layers_that_fit(whole, largest_bytes)
    if layers <= 0:
        _logger.info(
            "%s: not compared with transformers: one layer takes over %d bytes",
            base.path,
            largest_bytes,
        )
        return
    spec = replace(base.spec, layers=base.spec.layers[:layers])
    windows: list[Tensor] = []
    for window in windows_of(PROBE_TEXTS.values(), base.path, spec.max_position_embeddings):
        windows.append(window.unsqueeze(0))  # [1, S]
    expected = _logits_by_transformers(base, spec, windows)
    found = _logits_by_this_package(base, spec, windows)
    differences: list[Tensor] = []
    for ours, theirs in zip(found, expected, strict=True):
        differences.append(ours - theirs)
    difference = _largest_magnitude(differences)
    allowed = TOLERANCE * max(1.0, _largest_magnitude(expected))
    compared = f"{layers} of {base.spec.num_layers} layers"
    if not difference <= allowed:  # written so that a NaN fails
        raise BaseModelError(
            f"{base.path}: logits of {compared} differ from those of transformers by "
            f"{difference:.3g}, expected at most {allowed:.3g}: its config.json (model_type "
            f"{spec.family!r}) is misread; do not train on it, and report its config.json"
        )
    _logger.info(
        "%s: logits equal those of transformers within %.2g (%s)", base.path, difference, compared
    )


def _largest_magnitude(tensors: list[Tensor]) -> float:
    """The largest absolute value; NaN where there is one, unlike Python's max."""
    return float(torch.stack([tensor.abs().max() for tensor in tensors]).max())


def _layers_that_fit(decoder: Decoder, largest_bytes: int) -> int:
    """How many of the first layers fit beside embedding, last norm and output."""
    layer_bytes = list(map(_fp32_bytes, decoder.layers))
    other_bytes = _fp32_bytes(decoder) - sum(layer_bytes)
    return min(len(layer_bytes), (largest_bytes - other_bytes) // max(layer_bytes))


def _fp32_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * torch.float32.itemsize for parameter in module.parameters())


def _logits_by_this_package(
    base: BaseFolder, spec: DecoderSpec, windows: list[Tensor]
) -> list[Tensor]:
    """The logits [S, V] of each window [1, S], by the layers of `spec`, the first of `base`."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    # Each module has its weights during its forward pass only.
    fill_output = stream_weights(decoder, base.read, torch.float32)
    hidden = [decoder.hidden_states(window) for window in windows]
    fill_output()
    return [decoder.output.logits(states) for states in hidden]


def _logits_by_transformers(
    base: BaseFolder, spec: DecoderSpec, windows: list[Tensor]
) -> list[Tensor]:
    """The logits [S, V] of each window [1, S], by transformers, with the layers of `spec`."""
    changes: dict[str, Any] = {}
    if spec.num_layers < base.spec.num_layers:
        changes = {"num_hidden_layers": spec.num_layers, **family_of(spec).layer_entries(spec)}
    # For a whole base there are no changes: config.json is compared as transformers reads it.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # It would list the layers that are left out.
    transformers_logging.disable_progress_bar()
    try:
        with faults_of_library(f"{base.path}: cannot be loaded by transformers", BaseModelError):
            # In fp32: the rounding of bf16 would hide many misread settings.
            model = AutoModelForCausalLM.from_pretrained(
                base.path,
                **loading_options(base_config(base.path), **changes),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            ).eval()
            return [model(window, use_cache=False).logits[0] for window in windows]
    finally:
        transformers_logging.set_verbosity(verbosity)
