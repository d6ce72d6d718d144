"""The run's figures by step: TensorBoard, and metrics.jsonl for everything else.

A run that goes on from step k drops what an interrupted attempt wrote after k: each step has one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from pipeline.files import write_text

FILE = "metrics.jsonl"


class Metrics:
    """Writes figures, each under its lasting name; on ranks that are not the `writer` it does nothing."""

    def __init__(self, folder: Path, step: int, *, writer: bool) -> None:
        self._tensorboard: Any = None
        if not writer:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        kept = [json.dumps(line) + "\n" for line in read_metrics(path) if step > 0 and line["step"] <= step]
        write_text(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records what is known after `step` steps."""
        if self._tensorboard is None:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Puts everything on the disk."""
        if self._tensorboard is not None:
            self._file.close()
            self._tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a killed process left unfinished is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
