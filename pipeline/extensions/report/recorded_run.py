"""What the folder of a run holds, finished or not, for its page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config.sources import RUN_FILE, read_settings
from pipeline.errors import RunFolderError
from pipeline.extensions.report.gate_record import GateFigures, read_gate_figures
from pipeline.extensions.report.recorded_metrics import RunMetrics, read_run_metrics
from pipeline.extensions.report.written_texts import Continued, read_written_texts
from pipeline.files.json_files import first_fault, read_object
from pipeline.run_folder.attempts import NAME as ATTEMPTS
from pipeline.run_folder.attempts import Training, read_attempts
from pipeline.run_folder.metrics import METRICS
from pipeline.run_folder.status import (
    SUMMARY,
    TRAINING_FILE,
    RunStatus,
    is_trained,
    read_status,
    runs_in,
)

_Schema = TypeVar("_Schema", bound=BaseModel)


class ScoredText(BaseModel):
    """How well a model predicts a corpus; what is None is infinite."""

    model_config = ConfigDict(frozen=True)

    documents: int
    tokens: int
    perplexity: float | None
    bits_per_byte: float | None
    whole: bool = True


class AnsweredChats(BaseModel):
    """How well a model answers the chats of a file."""

    model_config = ConfigDict(frozen=True)

    chats: int
    exact_match: float
    ended: float
    answer_tokens: float


class Scores(BaseModel):
    """The scores of the base ("before") and of the export ("after") in summary.json."""

    model_config = ConfigDict(frozen=True)

    scores: dict[str, dict[str, ScoredText]]
    chats: dict[str, dict[str, AnsweredChats]] = {}
    export_max_abs_logit_difference: float | None = None


class TrainedRun(BaseModel):
    """The figures of training.json, which a run has at its end."""

    model_config = ConfigDict(frozen=True)

    trainable_parameters: int | None = None
    total_parameters: int | None = None
    tokens_seen: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class RecordedRun:
    """A run, as its folder has it.

    Attributes:
        settings: those of its run.yaml; empty where there is none.
        training: what its last attempt trains; None before the first.
        trained: None for a run that is not trained to its end.
        gate: None for a run without one, and before it is fitted.
        scores: None before `scale-cpt evaluate`.
        stored_bytes: of what lies in its folder, by name.
    """

    folder: Path
    settings: Mapping[str, Any]
    status: RunStatus
    metrics: RunMetrics
    texts: list[Continued]
    training: Training | None
    trained: TrainedRun | None
    gate: GateFigures | None
    scores: Scores | None
    stored_bytes: Mapping[str, int]

    @property
    def name(self) -> str:
        return str(self.settings.get("name") or self.folder.resolve().name)

    @property
    def has_gate(self) -> bool:
        """Whether it is to have a gate, which is fitted after training."""
        return self.gate is not None or self.settings.get("gate") is not None


def read_run(folder: Path) -> RecordedRun:
    """Reads the folder of a run.

    Raises:
        RunFolderError: there is no such folder, it is no run's, or a file in it is damaged.
        CheckpointError: the gate's record is damaged.
        ConfigError: its run.yaml is damaged.
    """
    status = read_status(folder)
    _check_is_a_run(folder)
    training: Training | None = None
    for attempt in read_attempts(folder):
        training = attempt.training or training
    return RecordedRun(
        folder=folder,
        settings=read_settings(folder) if (folder / RUN_FILE).is_file() else {},
        status=status,
        metrics=read_run_metrics(folder),
        texts=read_written_texts(folder),
        training=training,
        trained=_read(folder / TRAINING_FILE, TrainedRun) if is_trained(folder) else None,
        gate=read_gate_figures(folder),
        scores=_read(folder / SUMMARY, Scores) if (folder / SUMMARY).is_file() else None,
        stored_bytes=_stored_bytes(folder),
    )


def _check_is_a_run(folder: Path) -> None:
    """Raises a RunFolderError unless `folder` holds what a run writes."""
    if any((folder / name).is_file() for name in (ATTEMPTS, METRICS, RUN_FILE)):
        return
    several = runs_in(folder)
    if several:
        raise RunFolderError(
            f"{folder}: holds {len(several)} runs, and a page is of one; name one of them, such as "
            f"{several[0]}"
        )
    raise RunFolderError(
        f"{folder}: not a run's folder; expected {METRICS}, {ATTEMPTS} or {RUN_FILE} in it, found "
        "none of them; name the folder that a run's configuration has as `folder`"
    )


def _read(path: Path, schema: type[_Schema]) -> _Schema:
    """A JSON file of the run as a `schema`.

    Raises:
        RunFolderError: it is damaged.
    """
    try:
        return schema.model_validate(read_object(path, RunFolderError, "write it again"))
    except ValidationError as fault:
        raise RunFolderError(f"{path}: {first_fault(fault)}; write it again") from None


def _stored_bytes(folder: Path) -> dict[str, int]:
    """The bytes of each folder in a run's folder, largest first, and of its other files."""
    seen: set[tuple[int, int]] = set()
    sizes: dict[str, int] = {}
    for place, _, names in os.walk(folder):
        below = Path(place).relative_to(folder).parts
        part = below[0] if below else "other files"
        for name in names:
            # A run that is going on removes old checkpoints.
            with suppress(FileNotFoundError):
                found = (Path(place) / name).lstat()
                # A checkpoint may share files with others by hard links.
                if (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    sizes[part] = sizes.get(part, 0) + found.st_size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
