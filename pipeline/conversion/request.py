"""A request to convert a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.config.run import RunConfig
from pipeline.conversion import AUTO, Purpose


@dataclass(frozen=True)
class Conversion:
    """A request to convert a checkpoint.

    Attributes:
        checkpoint: the folder of the checkpoint.
        base: the folder of its base.
        output: the folder to write.
        format: the name of the format, or `auto`: the first that can express the model.
        dtype: the type of the weights; None: the base's own, but fp32 with a base of which
            transformers keeps parameters in fp32.
        gate: the folder of the run's gate; None: the export has none.
        vocabulary: the folder of the extended vocabulary; None: where it was in training.
        overwrite: whether anything at `output` may be replaced.
        purpose: what the export is for; it decides the scale at which a merged export stores added
            channels.
        tp_size: how many GPUs a merged export of a widened model is padded for, with zeros.
        options: the options of single formats that were asked for (`FormatOption`), by name.
        run: the run that the checkpoint is of; None: it is named without its run.
    """

    checkpoint: Path
    base: Path
    output: Path
    format: str = AUTO
    dtype: torch.dtype | None = None
    gate: Path | None = None
    vocabulary: Path | None = None
    overwrite: bool = False
    purpose: Purpose = "serving"
    tp_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    run: RunConfig | None = None
