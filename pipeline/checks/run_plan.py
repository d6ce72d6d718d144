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
    """What a run will do.

    Args:
        rows: Lines of text, each under a name. A name may have several lines.
        to_make: The inputs that earlier stages have not made yet.
        faults: What would stop the run.
        figures: What programs read of the plan; None where it is not known.
    """

    rows: list[Row]
    to_make: list[str]
    faults: list[str]
    figures: dict[str, Any]

    def values(self) -> dict[str, Any]:
        """The plan for programs (docs/json.md)."""
        rows = [{"name": name, "text": text} for name, text in self.rows]
        return {**self.figures, "rows": rows, "to_make": self.to_make, "errors": self.faults}

    def __str__(self) -> str:
        """A few dozen lines, with the faults at the end."""
        rows = list(self.rows)
        for text in self.to_make:
            rows.append(("yet to make", text))
        for text in self.faults or ["none found"]:
            rows.append(("errors", text))
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
