"""Writes one HTML page that shows what runs learned and forgot: figures, tables, costs.

    python tools/report.py runs/korean --output report.html
    python tools/report.py runs/korean --output report.html --beside docs/results/paper-korean
    python tools/report.py runs/demo runs/demo-fft --output report.html --png docs/figures

A RUN is a study's folder, with its summary.json, or a run's folder, with its metrics.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.experiments.report.page import page, write_pngs
from pipeline.experiments.report.runs import read_runs
from pipeline.files import write_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of studies or runs")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default report.html)")
    parser.add_argument("--title", default="What was learned, what was forgotten", help="the page's heading")
    parser.add_argument("--beside", type=Path, metavar="STUDY", help="another study, for a table by method")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write the figures there, as PNG files")
    arguments = parser.parse_args()

    runs = read_runs(arguments.runs)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    others = read_runs([arguments.beside]) if arguments.beside else []
    write_text(arguments.output, page(runs, arguments.title, others))
    print(arguments.output)
    for path in write_pngs(runs, arguments.png) if arguments.png else ():
        print(path)


if __name__ == "__main__":
    command_line.run(main)
