"""Cleans a synthetic crawl, and prints what became of each kind of document: make clean-check.

With --write it writes the crawl instead, as UTF-8 and without the broken records: make clean-study.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from pipeline.extensions.cleaning.clean import clean
from studies.cleaning.crawl import Crawl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--copies", type=int, default=100, help="documents of each kind of fault (default: 100)"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="only write the crawl, as one JSONL file"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        crawl = Crawl(Path(folder, "crawl"), options.copies)
        if options.write:
            options.write.parent.mkdir(parents=True, exist_ok=True)
            options.write.write_text(
                "".join(
                    json.dumps({"text": text}) + "\n"
                    for kind, text, _ in crawl.documents
                    if kind != "broken record"
                )
            )
            return
        cleaned = clean(crawl.job, workers=len(os.sched_getaffinity(0)))
        print(f"{'planted':<34}{'documents':>10}{'right':>8}  dropped by")
        for kind, (count, right, steps) in sorted(crawl.rows().items()):
            print(f"{kind:<34}{count:>10,}{right:>8.1%}  {steps}".rstrip())
        print(f"\n{'step':<34}{'dropped':>10}{'precision':>11}")
        for step, (count, precision) in crawl.precision(cleaned).items():
            print(f"{step:<34}{count:>10,}{precision:>11.1%}")


if __name__ == "__main__":
    main()
