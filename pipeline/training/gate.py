"""The step-0 gate: training starts only where the widened model says exactly what its base says."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeline.errors import PreservationError
from pipeline.training.batches import MicroBatch
from pipeline.training.engine import Engine


def max_abs_logit_difference(engine: Engine, probe: MicroBatch) -> float:
    """The largest difference between the model's logits and those of its base alone, over all ranks' probes.

    The base runs by itself through the same weights and kernels, under the same layout, so exactly 0.0 is owed.
    """
    with engine.evaluating():
        difference = (engine.logits(probe, "model") - engine.logits(probe, "base")).abs().max()
    difference = torch.nan_to_num(difference, nan=torch.inf)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return float(difference)


def check_preservation(engine: Engine, probe: MicroBatch, source: str) -> float:
    """Measures the difference before the first step; `source` says where the weights came from.

    Raises:
        PreservationError: it is not 0.0.
    """
    difference = max_abs_logit_difference(engine, probe)
    if difference != 0.0:
        raise PreservationError(
            f"{source}: at step 0 the widened model's logits differ from the base model's by up to {difference:.3g}, "
            f"expected 0.0; remove the folder and make the initial expansion again with tools/upscale.py"
        )
    return difference
