"""The fuzz: damages sound inputs at random, and checks that every reader refuses them in one line
or
reads them right.

python -m tests.fuzz --minutes 5 --seed 1            prints the table; exit code 1 if an outcome is
not right or refused python -m tests.fuzz --only checkpoints              inputs of these subjects
only

Inputs that are not right or refused are kept in the folder, with answer.json and log.txt of their
reader.
"""

# ruff: noqa: T201  (a command line)
from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from itertools import count, islice, takewhile
from pathlib import Path

# Before the packages that read them are imported: children are forked, which threads do not
# survive.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", DS_ACCELERATOR="cpu")

from pipeline.files.json_files import write_json
from tests.fuzz.runner import GOOD, results
from tests.fuzz.subjects import SUBJECTS

TARGETS = list(dict.fromkeys(subject.target for subject in SUBJECTS))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long (default: 5)")
    add("--inputs", type=int, help="how many instead")
    add("--seed", type=int, default=1, help="of all random choices (default: 1)")
    add(
        "--only",
        nargs="+",
        metavar="SUBJECT",
        choices=TARGETS,
        default=TARGETS,
        help=f"of {', '.join(TARGETS)}",
    )
    add(
        "--folder",
        type=Path,
        default=Path("runs/fuzz"),
        help="where inputs are made and kept (default: runs/fuzz)",
    )
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    numbers = takewhile(
        lambda _: options.inputs or time.monotonic() < ends, islice(count(), options.inputs)
    )
    folder = options.folder.absolute()
    chosen = [subject for subject in SUBJECTS if subject.target in options.only]
    found = list(results(folder, chosen, options.seed, numbers))
    bad = [result._asdict() for result in found if result.outcome not in GOOD]
    write_json(folder / "summary.json", {"seed": options.seed, "inputs": len(found), "faults": bad})
    for (target, outcome), times in sorted(
        Counter((result.target, result.outcome) for result in found).items()
    ):
        print(f"{target:<20} {outcome:<14} {times:>6}")
    for result in bad:
        print("", *(f"{name}: {value}" for name, value in result.items()), sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
