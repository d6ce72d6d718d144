"""Puts expansions of one base into one folder.

    scale-cpt combine served korean=runs/ko law=runs/law

Each expansion is the folder of a converted run, or of its export. The run is one of method `scale`,
variant Preserve or Adapt, or of method `lora`. It has a gate, and is exported in the format `scale`
from its newest checkpoint. The folder that is made holds the base once, and is a model for
transformers:

    AutoModelForCausalLM.from_pretrained("served", trust_remote_code=True, active=["korean"])

Where no gate opens, the base writes the text. docs/expansions.md says which expansion gives a
token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import log
from pipeline.errors import ConfigError

_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, help="the folder to make; an earlier combination is replaced"
    )
    parser.add_argument(
        "runs",
        metavar="NAME=RUN",
        nargs="+",
        help="a name for the expansion, and the folder of its run or export",
    )


def main(arguments: argparse.Namespace) -> None:
    runs = dict[str, Path]()
    for pair in arguments.runs:
        name, _, path = pair.partition("=")
        # A name is a folder, and an argument of `active`: of two alike one would be lost.
        if not path or name in runs:
            raise ConfigError(f"{pair}: expected NAME=RUN, and each name once")
        runs[name] = Path(path)
    _logger.info("combining %s into %s: loading the libraries", ", ".join(runs), arguments.folder)
    # After the arguments are checked, so that a mistake in them is reported at once.
    from pipeline.extensions.combination.combine import combine

    combine(arguments.folder, runs)
