"""The results of the faults: a table, and summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.files import write_json

_TITLES = ("fault", "times", "steps lost", "seconds to resume", "sequence equal")


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
        remarks: for the terminal and summary.json.
    """

    fault: str
    times: int
    steps_lost: int | None
    seconds_to_resume: float | None
    sequence_equal: bool
    remarks: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of the table, and the remarks."""
        lost = "all" if self.steps_lost is None else str(self.steps_lost)
        seconds = "never" if self.seconds_to_resume is None else f"{self.seconds_to_resume:.1f}"
        return self.fault, str(self.times), lost, seconds, "yes" if self.sequence_equal else "NO", self.remarks


def write_summary(path: Path, results: Sequence[Result]) -> None:
    """Writes summary.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [asdict(result) for result in results])


def read_summary(path: Path) -> list[Result]:
    """Reads it back."""
    return [Result(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def as_markdown(results: Sequence[Result]) -> str:
    """The table, without remarks."""
    rows = [_TITLES, ("---",) * len(_TITLES), *(result.cells[:-1] for result in results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
