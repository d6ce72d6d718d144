"""Makes a corpus of a web crawl: documents are repaired, filtered and deduplicated."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.extension import Command, Extension


class Cleaning(Extension):
    name = "cleaning"

    def commands(self) -> Mapping[str, Command]:
        return {
            "clean": Command(
                "Cleans the corpora of a run that have a section `clean`, before tokenization.",
                module="pipeline.extensions.cleaning.command",
                after="config",
            )
        }


EXTENSION = Cleaning()
