"""The fault suite: injects every known fault into real runs on a real two-node Slurm, and compares the results.

python -m tests.faults                       all; prints the table and writes runs/faults/summary.json
python -m tests.faults --only requeue hung   some
python -m tests.faults --markdown            the table of an earlier summary, for docs/faults.md
"""

# ruff: noqa: T201  (a command line)
from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import traceback
from pathlib import Path

from tests.faults.runs import Laboratory
from tests.faults.suite import FAULTS
from tests.faults.table import Result, as_markdown, read_summary, write_summary
from tests.slurm.cluster import guarded_cluster
from tests.slurm.daemons import why_not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    parser.add_argument("--markdown", action="store_true", help="print summary.json as a table, and do nothing else")
    arguments = parser.parse_args()
    summary = arguments.folder / "summary.json"
    if arguments.markdown:
        print(as_markdown(read_summary(summary)))
        return 0
    if reason := why_not():
        print(f"error: no Slurm: {reason}", file=sys.stderr)
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"
    shutil.rmtree(arguments.folder, ignore_errors=True)
    results = break_runs(arguments.only, arguments.folder.resolve())
    write_summary(summary, results)
    print(f"\n{as_markdown(results)}\nwrote {summary}")
    return 0 if all(result.sequence_equal for result in results) else 1


def break_runs(names: list[str], folder: Path) -> list[Result]:
    """Tries the faults one after the other. One that a run does not survive has a row that says so."""
    laboratory = Laboratory(folder)
    results = []
    with guarded_cluster() as cluster:
        for name in names:
            fault, began = FAULTS[name], time.monotonic()
            try:
                result = fault.inject_into_run(laboratory, cluster)
            except Exception as error:  # noqa: BLE001  the other faults are still injected
                traceback.print_exc()
                reason = str(error).partition("\n")[0]
                result = Result(fault.title, 1, None, None, sequence_equal=False, remarks=reason)
            results.append(result)
            print(f"[{time.monotonic() - began:.0f} s] {name}: {'  '.join(result.cells)}", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
