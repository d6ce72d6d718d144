"""The page of a run: its curves, its gate, what it wrote, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.extension import Command, Extension


class Report(Extension):
    name = "report"

    def commands(self) -> Mapping[str, Command]:
        return {
            "report": Command(
                "Writes the page of a run: curves, gate, texts and costs, for a browser.",
                module="pipeline.extensions.report.command",
                after="status",
            )
        }


EXTENSION = Report()
