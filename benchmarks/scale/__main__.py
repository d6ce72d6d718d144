"""What grows with ranks, shards, files and steps, tried on one machine: sparse files, light processes, links.

    python -m benchmarks.scale --json benchmarks/out/scale.json
    python -m benchmarks.scale --only corpora --smallest
    python -m benchmarks.scale --only --json benchmarks/out/scale.json --picture docs/scale.svg

Slopes are the exponents by which costs grow. docs/scale.md says what is simulated, and what that leaves out.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path

from benchmarks.scale.picture import draw
from pipeline.errors import UserError
from pipeline.files import read_object, write_json, write_text
from pipeline.studies.report.page import svg_file

SUBJECTS = ("corpora", "startup", "watchdog", "checkpoints", "metrics")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SUBJECTS, default=SUBJECTS, help="some subjects, or none")
    parser.add_argument("--smallest", action="store_true", help="sizes that take seconds, to see that everything runs")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files: some GB, 10^5 files")
    parser.add_argument("--json", type=Path, required=True, help="the tables; those of other subjects stay in it")
    parser.add_argument("--picture", type=Path, help="also draw the slopes of all tables in it, as SVG")
    parser.add_argument("--beside", type=Path, help="tables of an earlier version, for the picture")
    options = parser.parse_args()
    found = read_object(options.json, UserError) if options.json.exists() else {}
    for subject in options.only:
        with tempfile.TemporaryDirectory(prefix=f"scale-{subject}-", dir=options.scratch) as scratch:
            module = importlib.import_module(f"benchmarks.scale.{subject}")
            found[subject] = list(module.measure(Path(scratch), options.smallest))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.json, found)
    if options.picture:
        before = read_object(options.beside, UserError) if options.beside else {}
        write_text(options.picture, svg_file(draw(found, before)))


if __name__ == "__main__":
    main()
