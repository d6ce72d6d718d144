"""Which features of a run go together, as the checks of a run say: `scale-cpt combinations`.

`features.py` names the features and their settings, `ask.py` asks the checks of a run that has some
of them, `tables.py` asks for every pair.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.extension import Command, Extension


class Compatibility(Extension):
    name = "compatibility"

    def commands(self) -> Mapping[str, Command]:
        return {
            "combinations": Command(
                "Prints which features of a run go together, and why others do not.",
                module="pipeline.extensions.compatibility.command",
                after="estimate",
            )
        }


EXTENSION = Compatibility()
