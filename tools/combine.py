"""Puts expansions of one base into one folder: adds, removes and lists them.

    scale-cpt combine served --add korean=runs/ko --add law=runs/law
    scale-cpt combine served --remove law
    scale-cpt combine served

Each is a finished run of method `scale`, Preserve or Adapt, with a gate, exported in the format `scale`; or the folder
of such an export. The folder that is made holds the base once, and is a model for transformers:

    AutoModelForCausalLM.from_pretrained("served", trust_remote_code=True, active=["korean"])

Where no gate has opened the text is the base's; docs/expansions.md says which expansion gives a token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder; a new one is made")
    parser.add_argument(
        "--add", metavar="NAME=RUN", action="append", default=[], help="a run's folder, or its export's"
    )
    parser.add_argument("--remove", metavar="NAME", action="append", default=[], help="an expansion in the folder")


def main(arguments: argparse.Namespace) -> None:
    added = dict[str, Path]()
    for pair in arguments.add:
        name, _, path = pair.partition("=")
        if not path or name in added:
            raise ConfigError(f"--add {pair}: expected NAME=RUN, and each name once")
        added[name] = Path(path)
    # Imported after the arguments are checked: a mistake in them is reported at once.
    from pipeline.conversion.combine import HEADER, combine, expansions_in, rows_of
    from pipeline.evaluation.table import table

    changed = added or arguments.remove
    records = combine(arguments.folder, added, arguments.remove) if changed else expansions_in(arguments.folder)
    print(table(HEADER, rows_of(records)))


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
