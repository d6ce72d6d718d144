"""What all parts share: where they run, the rows that they return, and a small model of each
variant."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.results import STORIES
from pipeline.config.base import BasePrecision
from pipeline.config.method import Method, ScaleMethod
from pipeline.methods import method_for, quantize_base
from pipeline.methods.scale import upscale
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import open_base
from pipeline.parallel.quantized import Fp8Recipe
from pipeline.parallel.sharding import default_dtype
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.sizing.mfu import dense_tflops

_H100_CLASS = 800.0
"""Dense 16-bit TFLOP/s."""


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


def small_methods() -> dict[str, ScaleMethod]:
    """The variants, for stories260K."""
    widths = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4}
    lowest = {"preserve": None, "adapt": 3, "route": 3}
    return {
        variant: ScaleMethod.model_validate(
            {"name": "scale", "expansion": widths, "variant": variant, "l_fp": l_fp}
        )
        for variant, l_fp in lowest.items()
    }


def started(
    method: Method,
    setting: Setting,
    dtype: torch.dtype,
    tp: TensorParallel = SINGLE,
    base_precision: BasePrecision = "bf16",
) -> CausalDecoder:
    """stories260K before the first step."""
    base = open_base(STORIES)
    with tempfile.TemporaryDirectory(dir=setting.folder) as temporary:
        expansion = Path(temporary) / "expansion"
        if isinstance(method, ScaleMethod):
            upscale(method, base, expansion, seed=0)
        training = method_for(method, expansion, seed=0)
        with default_dtype(dtype):
            model = training.build(base.spec, tp, "none")
        if base_precision != "bf16":
            # All of its matrices are small: their products are to be those of a large base.
            quantize_base(model, base_precision, Fp8Recipe(skip_small=False))
        training.load(model, base, tp)
    return model.to(setting.device)
