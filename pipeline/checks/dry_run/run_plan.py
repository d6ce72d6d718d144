"""The plan of a run, as users and programs read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipeline.config.run import RunConfig

Row: TypeAlias = tuple[str, str]
"""A line of the plan: its name, and its text."""


@dataclass
class RunPlan:
    """The plan of a run.

    Attributes:
        rows: lines of text, each with a name; several lines may have the same name.
        to_make: the inputs that earlier stages have not made yet.
        faults: the faults that would stop the run.
        figures: the figures for programs; None where a figure is not known.
    """

    rows: list[Row]
    to_make: list[str]
    faults: list[str]
    figures: dict[str, Any]

    def values(self) -> dict[str, Any]:
        """The plan for programs (docs/json.md)."""
        rows: list[dict[str, str]] = []
        for name, text in self.rows:
            rows.append({"name": name, "text": text})
        return {**self.figures, "rows": rows, "to_make": self.to_make, "errors": self.faults}

    def __str__(self) -> str:
        """A few dozen lines, with the faults at the end."""
        rows = list(self.rows)
        for text in self.to_make:
            rows.append(("yet to make", text))
        for text in self.faults:
            rows.append(("errors", text))
        if not self.faults:
            rows.append(("errors", "none found"))
        width = max(len(name) for name, _ in self.rows)
        lines: list[str] = []
        name_before = ""
        for name, text in rows:
            shown = "" if name == name_before else name
            lines.append(f"{shown:<{width}}  {text}")
            name_before = name
        return "\n".join(lines)


def times_in_run(config: RunConfig, every_steps: int) -> int:
    """How often something happens that is done every `every_steps` steps and at the end."""
    return math.ceil(config.schedule.steps / every_steps)
