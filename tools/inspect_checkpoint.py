"""Prints a checkpoint's method, widths, base, step, tokens, trained share, and the norms of its blocks.

python tools/inspect_checkpoint.py runs/demo/checkpoints/step_00000300
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipeline import command_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a folder such as runs/demo/checkpoints/step_00000300")
    parser.add_argument("--base", type=command_line.folder_or_hub, help="the path of the base, if it has moved")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args()
    from pipeline.conversion.trained_model import as_text, describe_checkpoint  # after --help: it loads torch

    facts = describe_checkpoint(arguments.checkpoint, arguments.base)
    print(json.dumps(facts, indent=2) if arguments.json else as_text(facts))


if __name__ == "__main__":
    command_line.run(main)
