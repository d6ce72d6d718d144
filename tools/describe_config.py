"""Prints every setting of a run configuration, with its type, default and meaning, as docs/configuration.md.

python tools/describe_config.py > docs/configuration.md
"""

from __future__ import annotations

import argparse

from pipeline import command_line
from pipeline.config.reference import as_markdown


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(as_markdown(), end="")


if __name__ == "__main__":
    command_line.run(main)
