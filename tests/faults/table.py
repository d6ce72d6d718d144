"""The results of the faults: a table as text or Markdown, and summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.files import write_json

_TITLES = ("fault", "times", "steps lost", "seconds to resume", "sequence equal", "remarks")


@dataclass(frozen=True)
class Result:
    """The result of one kind of fault.

    Attributes:
        fault: its description.
        times: how often it was injected.
        steps_lost: the largest number of steps computed again or skipped; None where the run was lost.
        seconds_to_resume: the longest from the fault to the first new step, with five seconds in place of Slurm's two
            minutes between attempts; None where the run was lost.
        sequence_equal: whether the metrics of every run equal those of an undisturbed one, bit for bit.
        remarks: for the table.
    """

    fault: str
    times: int
    steps_lost: int | None
    seconds_to_resume: float | None
    sequence_equal: bool
    remarks: str = ""

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in summary.json."""
        seconds = self.seconds_to_resume
        return {
            "fault": self.fault,
            "times": self.times,
            "steps_lost": self.steps_lost,
            "seconds_to_resume": None if seconds is None else round(seconds, 1),
            "sequence_equal": self.sequence_equal,
        }

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of the table."""
        lost = "all" if self.steps_lost is None else str(self.steps_lost)
        seconds = "never" if self.seconds_to_resume is None else f"{self.seconds_to_resume:.1f}"
        return self.fault, str(self.times), lost, seconds, "yes" if self.sequence_equal else "NO", self.remarks


def write_summary(path: Path, results: Sequence[Result]) -> None:
    """Writes summary.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [result.entry for result in results])


def read_summary(path: Path) -> list[Result]:
    """Reads it back; remarks are not in it."""
    return [Result(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def as_text(results: Sequence[Result]) -> str:
    """Columns under their titles."""
    rows = [_TITLES, *(result.cells for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    return "\n".join(_line(row, widths) for row in rows)


def as_markdown(results: Sequence[Result]) -> str:
    """The same, without remarks, for the documentation."""
    rows = [_TITLES, ("---",) * len(_TITLES), *(result.cells for result in results)]
    return "\n".join(f"| {' | '.join(row[:-1])} |" for row in rows)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    numeric = range(1, 4)
    cells = (
        cell.rjust(width) if column in numeric else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
