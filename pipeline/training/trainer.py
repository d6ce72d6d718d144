"""Everything that the loop drives, in one hand."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.run import RunConfig
from pipeline.training.batches import TrainingBatches
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.diagnostics import Diagnostics
from pipeline.training.engine import Engine
from pipeline.training.instruments import Instruments
from pipeline.training.metrics import Metrics
from pipeline.training.phases import Phases
from pipeline.training.profiler import Profiler
from pipeline.training.progress import Progress
from pipeline.training.validation import Validation


@dataclass(frozen=True)
class Trainer:
    """The parts of a run that is about to begin or to go on."""

    config: RunConfig
    engine: Engine
    batches: TrainingBatches
    validation: Validation
    diagnostics: Diagnostics
    metrics: Metrics
    checkpoints: Checkpoints
    progress: Progress
    phases: Phases
    instruments: Instruments
    profiler: Profiler
