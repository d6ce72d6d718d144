"""The fuzz: damages sound inputs at random, and checks that every reader refuses them in one line or reads them right.

python -m tests.fuzz --minutes 5 --seed 1            prints the table; exit code 1 if an outcome is not right or refused
python -m tests.fuzz --seed 1 --only corpora         inputs of some targets
python -m tests.fuzz --seed 1 --input 117            makes that input again, and prints what its reader did

Inputs that are not right or refused are kept in the folder, in failures/.
"""

# ruff: noqa: T201  (a command line)
from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Before the packages that read them are imported: children are forked, which threads do not survive.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", DS_ACCELERATOR="cpu")

from tests.fuzz.lanes import fuzz
from tests.fuzz.runner import SECONDS, Laboratory
from tests.fuzz.table import as_text, faults_as_text, write_summary
from tests.fuzz.targets import SUBJECTS, TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long (default: 5)")
    add("--inputs", type=int, help="stop after that many inputs")
    add("--seed", type=int, default=1, help="of all random choices (default: 1)")
    add("--only", nargs="+", choices=TARGETS, default=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    add("--input", type=int, metavar="NUMBER", help="make this input only, and print its log")
    add("--lanes", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    add("--seconds", type=float, default=SECONDS, help=f"how long an input may take (default: {SECONDS:.0f})")
    add("--folder", type=Path, default=Path("runs/fuzz"), help="where inputs are made and kept (default: runs/fuzz)")
    options = parser.parse_args()
    laboratory = Laboratory(options.folder, SUBJECTS, options.seed, seconds=options.seconds)
    if options.input is not None:
        laboratory.prepare([laboratory.subject_of(options.input).target])
        result, place = laboratory.try_input(options.input, "single")
        print((place / "log.txt").read_text(errors="replace"))
        for name, value in vars(result).items():
            print(f"{name:10} {value}")
        print(f"{'folder':10} {place}")
        return 0 if result.is_good else 1
    laboratory.prepare(options.only)
    ends = time.monotonic() + 60 * options.minutes
    results = fuzz(laboratory, options.only, lanes=options.lanes, ends=ends, inputs=options.inputs)
    summary = laboratory.folder / "summary.json"
    write_summary(summary, results, options.seed)
    print(f"\n{as_text(results)}\n")
    if faults := faults_as_text(results, options.seed):
        print(f"{faults}\n\nwrote {summary}; kept inputs in {laboratory.folder / 'failures'}")
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
