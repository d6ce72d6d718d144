"""A base as this package reads it, compared with what transformers makes of the same folder.

The gate before the first step compares with our own reading of the base: it cannot see a config that we misread.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pipeline import log
from pipeline.conversion.verify import windows_of
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
"""What the model of transformers may take in fp32. Of a larger base, only the first layers that fit are compared."""
TOLERANCE = 1e-4
"""The largest difference of a logit, relative to the largest logit where that is above 1."""

_logger = log.get_logger(__name__)


@torch.no_grad()
def check_against_transformers(base: BaseFolder, largest_bytes: int = LARGEST_BYTES) -> None:
    """Compares the logits on a probe text, in fp32 on the CPU. Holds one module of ours, and theirs whole.

    Raises BaseModelError: they differ, or the weights do not fit config.json, or transformers cannot load the folder.
    """
    with torch.device("meta"):
        whole = Decoder(base.spec)
    check_weights(whole, base)
    rest = _bytes(whole) - sum(map(_bytes, whole.layers))
    layers = min(len(whole.layers), (largest_bytes - rest) // max(map(_bytes, whole.layers)))
    if layers <= 0:
        _logger.info(
            "%s: not compared with transformers: one layer takes over %d bytes",
            base.path,
            largest_bytes,
        )
        return
    spec = replace(base.spec, layers=base.spec.layers[:layers])
    with torch.device("meta"):
        decoder = Decoder(spec)
    windows = [
        one.unsqueeze(0)
        for one in windows_of(PROBE_TEXTS.values(), base.path, spec.max_position_embeddings)
    ]
    expected = _their_logits(base, spec, windows)
    fill_output = stream_weights(decoder, base.read, torch.float32)
    hidden = [decoder.hidden_states(window) for window in windows]
    fill_output()
    found = map(decoder.output.logits, hidden)
    difference = max(
        float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)
    )
    allowed = TOLERANCE * max(1.0, *(float(logits.abs().max()) for logits in expected))
    compared = f"{layers} of {base.spec.num_layers} layers"
    if not difference <= allowed:  # written so that a NaN fails
        raise BaseModelError(
            f"{base.path}: logits of {compared} differ from those of transformers by {difference:.3g}, expected at "
            f"most {allowed:.3g}: this model_type {spec.family!r} is not read rightly; do not train on it, and report "
            "its config.json"
        )
    _logger.info(
        "%s: logits equal those of transformers within %.2g (%s)", base.path, difference, compared
    )


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * torch.float32.itemsize for parameter in module.parameters())


def _their_logits(base: BaseFolder, spec: DecoderSpec, windows: list[Tensor]) -> list[Tensor]:
    fewer = {"num_hidden_layers": spec.num_layers, **family_of(spec).layer_entries(spec)}
    entries = (
        fewer if spec.num_layers < base.spec.num_layers else {}
    )  # else their own reading is what counts
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would list the layers that are left out
    transformers_logging.disable_progress_bar()
    try:
        with faults_of_library(f"{base.path}: cannot be loaded by transformers", BaseModelError):
            model = AutoModelForCausalLM.from_pretrained(
                base.path,
                **loading_options(base_config(base.path), **entries),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            ).eval()
            return [model(window, use_cache=False).logits[0] for window in windows]
    finally:
        transformers_logging.set_verbosity(verbosity)
