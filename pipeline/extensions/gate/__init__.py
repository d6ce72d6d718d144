"""Fits the gate of a finished run: which tokens are of new text, and read the trained blocks.

`fit_run.py` fits it, `effect.py` and `kind_effect.py` measure it, `table.py` shows the figures.
What a fitted gate is, and how models and exports hold it, is `pipeline.gating`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.extension import Command, Extension


class Gate(Extension):
    name = "gate"

    def commands(self) -> Mapping[str, Command]:
        return {
            "gate": Command(
                "Fits the gate of a finished run, which decides per token whether the text is new.",
                module="pipeline.extensions.gate.command",
                after="train",
            )
        }


EXTENSION = Gate()
