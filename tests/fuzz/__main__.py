"""The fuzz: damages sound inputs at random, and checks that every reader refuses them in one line or reads them right.

python -m tests.fuzz --minutes 5 --seed 1            prints the table; exit code 1 if an outcome is not right or refused
python -m tests.fuzz --seed 1 --only corpora         inputs of some targets
python -m tests.fuzz --seed 1 --input 117            makes that input again, and prints how its reader ended

Inputs that are not right or refused are kept in the folder, with answer.json and log.txt of their reader.
"""

# ruff: noqa: T201  (a command line)
from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict
from itertools import count, islice, takewhile
from pathlib import Path

# Before the packages that read them are imported: children are forked, which threads do not survive.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", DS_ACCELERATOR="cpu")

from pipeline.files import write_json
from tests.fuzz.runner import GOOD, Laboratory, as_text
from tests.fuzz.subjects import SUBJECTS


def main() -> int:
    targets = list(dict.fromkeys(subject.target for subject in SUBJECTS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long (default: 5)")
    add("--inputs", type=int, help="how many instead")
    add("--seed", type=int, default=1, help="of all random choices (default: 1)")
    add("--only", nargs="+", choices=targets, default=targets, metavar="TARGET", help=", ".join(targets))
    add("--input", type=int, metavar="NUMBER", help="make this input only")
    add("--lanes", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    add("--folder", type=Path, default=Path("runs/fuzz"), help="where inputs are made and kept (default: runs/fuzz)")
    options = parser.parse_args()
    laboratory = Laboratory(options.folder, SUBJECTS, options.seed)
    numbers = (number for number in count() if laboratory.subject_of(number).target in options.only)
    if options.input is not None:
        numbers, options.only = iter([options.input]), [laboratory.subject_of(options.input).target]
    laboratory.prepare(options.only)
    ends = time.monotonic() + 60 * options.minutes
    chosen = (
        islice(numbers, options.inputs) if options.inputs else takewhile(lambda _: time.monotonic() < ends, numbers)
    )
    results = list(laboratory.results(chosen, options.lanes))
    bad = [asdict(result) for result in results if result.outcome not in GOOD]
    write_json(laboratory.folder / "summary.json", {"seed": options.seed, "inputs": len(results), "faults": bad})
    print(as_text(results))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
