"""Model FLOPs utilisation (MFU): the peak performance of GPUs, and the share that a run reaches."""

from __future__ import annotations

import torch

from pipeline.config.run import RunConfig
from pipeline.methods.build_model import build_model
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.flops import count_flops
from pipeline.sizing.meta_device import NotTracedError

# By words in torch's name of the device; the first match counts. The figures are of bf16 and fp16,
# from NVIDIA's data sheets. Where these give figures "with sparsity" (Hopper, Blackwell), the dense
# figure is half.
_DENSE_16_BIT_TFLOPS: dict[tuple[str, ...], float] = {
    ("GB200",): 2500.0,
    ("B200",): 2250.0,
    ("GH200",): 989.5,
    ("H200", "NVL"): 835.5,
    ("H200",): 989.5,
    ("H100", "NVL"): 835.5,
    ("H100", "PCIe"): 756.5,
    ("H100",): 989.5,
    ("A100",): 312.0,
    ("A10",): 125.0,
    ("A30",): 165.0,
    ("L40S",): 362.05,
    ("L4",): 121.0,
    ("A6000",): 154.8,
    # GeForce: with accumulation in fp32, which is half of the figure for fp16.
    ("RTX", "3090"): 71.0,
    ("RTX", "4090"): 165.2,
    ("RTX", "5090"): 209.5,
}
_OTHER_CHIPS = {"MIG", "Laptop", "D"}
"""Words of names that have a table's words and another peak: a slice of a GPU, such as "NVIDIA
A100-SXM4-40GB MIG 1g.5gb", or a smaller chip."""


def dense_tflops(device_name: str) -> float | None:
    """The dense 16-bit peak of a GPU in TFLOP/s, by torch's name of it; None if it is unknown."""
    words = set(device_name.replace("-", " ").split())
    if words & _OTHER_CHIPS:
        return None
    for needed, tflops in _DENSE_16_BIT_TFLOPS.items():
        if words >= set(needed):
            return tflops
    return None


def peak_flops(config: RunConfig, dtype: torch.dtype, device: torch.device) -> float | None:
    """The peak of one device in `dtype`, in FLOP/s; None if it is unknown.

    It is `metrics.peak_tflops`, or by default the figure for the device's name.
    """
    tflops = config.metrics.peak_tflops
    if tflops is None and device.type == "cuda" and dtype.itemsize == 2:
        tflops = dense_tflops(torch.cuda.get_device_name(device))
    if tflops is None:
        return None
    return tflops * 1e12


def mfu_per_token_rate(config: RunConfig, spec: DecoderSpec, peak: float | None) -> float | None:
    """The MFU of a rate of one token per second on one device; None if it is not known.

    Of frozen parts only the FLOPs count that training computes. Recomputation by activation
    checkpointing does not count. The MFU is not known without a `peak` of the device, and for a
    base whose FLOPs cannot be counted.
    """
    if peak is None:
        return None
    with torch.device("meta"):
        model = build_model(config, spec, SINGLE, "none")
    try:
        flops = count_flops(model, config.data.sequence_length, config.data.kl_fraction)
    except NotTracedError:
        return None
    return flops.total / peak
