"""Says how a run is, from its folder alone: running, waiting, done or failed, how far, how fast, until when.

python tools/status.py runs/demo
python tools/status.py runs/demo --json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import orjson

from pipeline import command_line
from pipeline.run_folder.status import read_status
from pipeline.run_folder.status_text import as_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, e.g. runs/demo")
    parser.add_argument("--json", action="store_true", help="for a program")
    arguments = parser.parse_args()

    status = read_status(arguments.run)
    print(orjson.dumps(asdict(status), option=orjson.OPT_INDENT_2).decode() if arguments.json else as_text(status))


if __name__ == "__main__":
    command_line.run(main)
