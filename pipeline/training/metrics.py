"""The run's figures by step: TensorBoard, and metrics.jsonl for everything else.

A run that goes on from step k, or goes back to it, drops what was written after k: each step has one line. A full disk
loses none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from pipeline.run_folder.metrics import METRICS
from pipeline.training.appended_file import AppendedFile
from pipeline.training.event_file import event_file_name, first_events, scalar_event

BOARD = "tensorboard"


class Metrics:
    """Writes figures, each under its lasting name; on ranks that are not the `writer` it does nothing."""

    def __init__(self, folder: Path, step: int, *, writer: bool) -> None:
        self.folder = folder
        self._files: tuple[AppendedFile, AppendedFile] | None = None
        if writer:
            self._open(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records what is known after `step` steps."""
        if self._files is not None:
            lines, events = self._files
            lines.append((json.dumps({"step": step, **values}) + "\n").encode())
            events.append(*(scalar_event(name, value, step) for name, value in values.items()))

    def go_back(self, step: int) -> None:
        """Drops what was written after `step` steps: they are taken anew."""
        if self._files is not None:
            self.close()
            self._open(step)

    def close(self) -> None:
        """Puts everything on the disk."""
        for file in self._files or ():
            file.close()

    def _open(self, step: int) -> None:
        (self.folder / BOARD).mkdir(parents=True, exist_ok=True)
        cut_after(self.folder / METRICS, step)
        events = AppendedFile(self.folder / BOARD / event_file_name())
        events.append(*first_events(step + 1 if step else 0))
        self._files = AppendedFile(self.folder / METRICS), events


def cut_after(path: Path, step: int) -> None:
    """Ends a metrics.jsonl after the line of `step`; of a run that begins, nothing stays. Takes no room on the disk."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb+") as file:
        for line in file if step > 0 else ():
            if _step_of(line) > step:
                break
            kept += len(line)
        file.truncate(kept)


def _step_of(line: bytes) -> float:
    """The step that a line is about; one that a killed process left unfinished is about none yet."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except ValueError:
        return math.inf
