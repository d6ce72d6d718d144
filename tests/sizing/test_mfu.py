"""MFU: the peak of a device, and which of a model's operations count."""

from __future__ import annotations

import pytest
import torch

from pipeline.config.run import load_config
from pipeline.model.decoder import Decoder
from pipeline.sizing.flops import count_flops
from pipeline.sizing.mfu import dense_tflops, mfu_per_token_rate, peak_flops
from tests.training.journeys import METHODS
from tests.training.runs import write_config

PRESERVE = METHODS["preserve"]


def test_the_peak_is_that_of_a_known_gpu_or_the_setting(tmp_path):
    assert [dense_tflops(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")] == [
        989.5,
        312.0,
    ]
    assert dense_tflops("NVIDIA A100-SXM4-40GB MIG 3g.20gb") is dense_tflops("NVIDIA A10G") is None
    cpu = torch.device("cpu")
    assert peak_flops(load_config(write_config(tmp_path, tmp_path)), torch.bfloat16, cpu) is None
    config = load_config(write_config(tmp_path, tmp_path, metrics__peak_tflops=0.5))
    assert peak_flops(config, torch.float32, cpu) == 5e11


def test_mfu_counts_what_is_computed_for_each_token(base, tmp_path):
    spec = base("stories260K").spec

    def rate(**changes):
        return mfu_per_token_rate(
            load_config(write_config(tmp_path, tmp_path, **changes)), spec, 1e12
        )

    with torch.device("meta"):
        model = Decoder(spec)
        flops = count_flops(model, 32)
    # The embedding is tied to the output projection, so it counts as a matrix.
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert flops.matrix == 6 * matrices
    # Scores and weighted values, each a product of two matrices per head, and twice as much
    # backward.
    assert (
        flops.attention
        == 3 * 2 * 2 * 32 * spec.num_layers * spec.widths.num_attention_heads * spec.head_dim
    )
    full, preserve = rate(method={"name": "fft"}), rate(method=PRESERVE)
    assert full == pytest.approx(flops.total / 1e12)
    assert (
        preserve < full
    )  # most of the model is the base, which has no backward pass for its weights
    assert rate(method=PRESERVE, activation_checkpointing="all") == preserve
    assert rate(method=PRESERVE, base_precision="nf4") == preserve  # the products that are computed
    assert mfu_per_token_rate(load_config(write_config(tmp_path, tmp_path)), spec, None) is None
