"""The figures of a gate.json that a page shows, of this version and of earlier ones."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipeline.errors import CheckpointError
from pipeline.files.json_files import read_record
from pipeline.gating.folder import (
    GATE_FOLDER,
    GATE_RECORD,
    HeldoutText,
    KindFigures,
    ThresholdFigures,
)


class GateFigures(BaseModel):
    """The figures of a gate. Gates of earlier versions have fewer; other entries are not read."""

    model_config = ConfigDict(frozen=True)

    heldout: dict[str, HeldoutText]
    layer: int
    threshold: float
    auc: float
    open_ids: int = 0
    closed_fraction_of_new: float | None = None
    open_fraction_of_negatives: float | None = None
    threshold_rule: str = ""
    thresholds: dict[str, ThresholdFigures] = {}
    kinds: dict[str, KindFigures] = {}
    changes: dict[str, KindFigures] = {}
    closed_max_abs_logit_difference: float | None = None


def read_gate_figures(folder: Path) -> GateFigures | None:
    """The figures of the gate of the run in `folder`; None where it has none.

    Raises:
        CheckpointError: the gate's record is damaged.
    """
    path = folder / GATE_FOLDER / GATE_RECORD
    try:
        return read_record(
            path, GateFigures, CheckpointError, "fit the gate again with scale-cpt gate"
        )
    except FileNotFoundError:
        return None
