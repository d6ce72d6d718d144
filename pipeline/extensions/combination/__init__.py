"""One base with several expansions beside each other."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.extension import Command, Extension


class Combination(Extension):
    name = "combination"

    def commands(self) -> Mapping[str, Command]:
        return {
            "combine": Command(
                "Puts expansions of one base into one folder.",
                module="pipeline.extensions.combination.command",
                after="convert",
            )
        }


EXTENSION = Combination()
