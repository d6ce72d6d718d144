"""A first configuration for a base, texts and a machine: `scale-cpt config init`.

`propose.py` puts its sections together, `command.py` writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.extension import Command, Extension


class FirstConfig(Extension):
    name = "first_config"

    def commands(self) -> Mapping[str, Command]:
        return {
            "config init": Command(
                "write a first configuration, with sizes that fit a base and texts",
                module="pipeline.extensions.first_config.command",
                after="config",
            )
        }


EXTENSION = FirstConfig()
