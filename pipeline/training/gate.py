"""The step-0 gate: training starts only where the model says exactly what its base says."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.errors import PreservationError
from pipeline.methods import training_method
from pipeline.training.batches import MicroBatch
from pipeline.training.engine import Engine
from pipeline.training.unison import in_unison

_MAKE_AGAIN = "remove the folder and make the initial expansion again with tools/upscale.py"
_START_AGAIN = "the base's files may have changed while they were read: start again, and if it stays report it"


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


def check_preservation(engine: Engine, probe: MicroBatch, config: RunConfig) -> float | None:
    """Measures the difference before the first step.

    None where there is nothing to compare: the base itself trains, and nothing beside it; or the expansion comes from
    an earlier run, and has moved away from the base.

    Raises:
        PreservationError: it is not 0.0.
    """
    if not engine.model.keeps_base or not in_unison(training_method(config).starts_at_base):
        return None
    difference = max_abs_logit_difference(engine, probe)
    if difference != 0.0:
        widened = isinstance(config.method, ScaleMethod)
        source, remedy = (config.upscaled_folder, _MAKE_AGAIN) if widened else (config.base, _START_AGAIN)
        raise PreservationError(
            f"{source}: at step 0 the logits of method {config.method.name} differ from the base model's by up to "
            f"{difference:.3g}, expected 0.0; {remedy}"
        )
    return difference
