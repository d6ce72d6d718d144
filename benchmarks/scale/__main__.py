"""What grows with ranks, shards, files and steps, tried on one machine: sparse files, light processes, links.

    python -m benchmarks.scale --json benchmarks/out/scale.json
    python -m benchmarks.scale --only corpora --smallest

Each table ends with slopes: the exponents by which costs grow with the size. Processor times, counts and memory do not
depend on how busy the machine is. docs/scale.md says what is left out.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path

from pipeline.files import write_json

SUBJECTS = ("corpora", "metrics")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="some subjects")
    parser.add_argument("--smallest", action="store_true", help="sizes that take seconds, to see that everything runs")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files: some GB, 10^5 files")
    parser.add_argument("--json", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    found = {}
    for subject in options.only:
        with tempfile.TemporaryDirectory(prefix=f"scale-{subject}-", dir=options.scratch) as scratch:
            module = importlib.import_module(f"benchmarks.scale.{subject}")
            found[subject] = list(module.measure(Path(scratch), options.smallest))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, found)


if __name__ == "__main__":
    main()
