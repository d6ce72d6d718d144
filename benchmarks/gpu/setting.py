"""What the parts share: where they run, the rows that they return, and small models."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.results import STORIES
from pipeline.config.base import BasePrecision
from pipeline.config.method import Method, ScaleMethod
from pipeline.methods.build_model import quantize_base
from pipeline.methods.registry import method_for
from pipeline.methods.scale import upscale
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import open_base
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.quantized import Fp8Recipe
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.sizing.mfu import dense_tflops

_H100_CLASS = 800.0
"""Dense 16-bit TFLOP/s of a GPU for which goals of speed hold; an H100 SXM has 989."""
_MEMORY_TOLERANCE = 0.1
"""By how much an estimate of memory may be off."""


@dataclass(frozen=True)
class Setting:
    """Where the parts run.

    Attributes:
        device_type: `cuda`; or `cpu`, where parts are only tried, with tiny shapes.
        folder: that they write to.
        seconds: a part's time.
    """

    device_type: str
    folder: Path
    seconds: float

    @property
    def device(self) -> torch.device:
        """The device of models and tensors."""
        return torch.device(self.device_type)

    @property
    def on_gpu(self) -> bool:
        """Whether figures count: on a CPU parts are only tried."""
        return self.device_type == "cuda"

    @property
    def judges_speed(self) -> bool:
        """Whether goals of speed count here: on GPUs of the H100's class."""
        return self.on_gpu and (dense_tflops(torch.cuda.get_device_name()) or 0.0) >= _H100_CLASS


class CheckRow(NamedTuple):
    """What a check found. `passed` is None where nothing is demanded, or nothing could be tried."""

    check: str
    passed: bool | None
    found: str


def dtype_name(dtype: torch.dtype) -> str:
    """A type as rows name it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def largest_error(errors: Sequence[float]) -> float:
    """The largest of `errors`; NaN where one is NaN, unlike Python's `max`.

    So a comparison with a tolerance fails for results that are no numbers.
    """
    return float(torch.tensor(errors, dtype=torch.float64).max())


def memory_row(check: str, estimated_gib: float, measured_gib: float | None) -> CheckRow:
    """Whether an estimate of memory is within a tenth of what was measured; None on a CPU."""
    if measured_gib is None:
        return CheckRow(check, None, f"estimated {estimated_gib:.3g} GiB; measured on a GPU only")
    off = estimated_gib / measured_gib - 1
    found = f"estimated {estimated_gib:.2f} GiB, measured {measured_gib:.2f} GiB: off by {off:+.1%}"
    return CheckRow(check, abs(off) <= _MEMORY_TOLERANCE, found)


def small_methods() -> dict[str, ScaleMethod]:
    """The variants of SCALE, for stories260K, which has 5 layers."""
    widths = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4}
    methods: dict[str, ScaleMethod] = {}
    # Preserve has W12 in no layer; the others in the two uppermost.
    for variant, l_fp in (("preserve", None), ("adapt", 3), ("route", 3)):
        settings = {"name": "scale", "expansion": widths, "variant": variant, "l_fp": l_fp}
        methods[variant] = ScaleMethod.model_validate(settings)
    return methods


def started(
    method: Method,
    setting: Setting,
    dtype: torch.dtype,
    tp: TensorParallel = SINGLE,
    base_precision: BasePrecision = "bf16",
) -> CausalDecoder:
    """The model of a method on stories260K, before the first step, on the device."""
    base = open_base(STORIES)
    with tempfile.TemporaryDirectory(dir=setting.folder) as temporary:
        expansion = Path(temporary) / "expansion"
        if isinstance(method, ScaleMethod):
            upscale(method, base, expansion, seed=0)
        training = method_for(method, expansion, seed=0)
        with default_dtype(dtype):
            model = training.build(base.spec, tp, "none")
        if base_precision != "bf16":
            # By default small matrices are multiplied in bf16, and all of this base's are small.
            quantize_base(model, base_precision, Fp8Recipe(skip_small=False))
        training.load(model, base, tp)
    return model.to(setting.device)
