"""Cleans a synthetic crawl, and prints what became of each kind of document: make clean-check."""

# ruff: noqa: T201  (a command line)
from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from pipeline.cleaning.clean import clean
from tests.cleaning.crawl import Crawl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=100, help="documents of each kind of fault (default: 100)")
    with tempfile.TemporaryDirectory() as folder:
        crawl = Crawl(Path(folder, "crawl"), parser.parse_args().copies)
        cleaned = clean(crawl.job, workers=len(os.sched_getaffinity(0)))
        print(f"{'planted':<34}{'documents':>10}{'right':>8}  dropped by")
        for kind, (count, right, steps) in sorted(crawl.rows().items()):
            print(f"{kind:<34}{count:>10,}{right:>8.1%}  {steps}".rstrip())
        print(f"\n{'step':<34}{'dropped':>10}{'precision':>11}")
        for step, (count, precision) in crawl.precision(cleaned).items():
            print(f"{step:<34}{count:>10,}{precision:>11.1%}")


if __name__ == "__main__":
    main()
