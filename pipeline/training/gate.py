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
        hidden = engine.hidden_states(probe, "model"), engine.hidden_states(probe, "base")
        chunks = [(model - base).abs().max() for model, base in engine.logit_chunks(*hidden)]
    difference = torch.nan_to_num(torch.stack(chunks), nan=torch.inf).max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return float(difference)


def check_preservation(engine: Engine, probe: MicroBatch, source: str) -> float | None:
    """Measures the difference before the first step; `source` says where the weights came from.

    None where nothing was added to the base: there is nothing to compare.

    Raises:
        PreservationError: it is not 0.0.
    """
    if engine.model.plan is None:
        return None
    difference = max_abs_logit_difference(engine, probe)
    if difference != 0.0:
        raise PreservationError(
            f"{source}: at step 0 the widened model's logits differ from the base model's by up to {difference:.3g}, "
            f"expected 0.0; remove the folder and make the initial expansion again with tools/upscale.py"
        )
    return difference
