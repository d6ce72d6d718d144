"""Writes one HTML page that shows what runs learned and forgot: figures, tables, costs.

    scale-cpt report runs/korean --output report.html
    scale-cpt report runs/korean --output report.html --beside docs/results/paper-korean
    scale-cpt report runs/demo runs/demo-fft --output report.html --png docs/figures

    scale-cpt report runs/mine --compare mine-v1           # a run's name beside it, or its folder
    scale-cpt report runs/mine --watch 60                  # again every minute, until it is finished

A RUN is a study's folder, with its summary.json, or a run's folder, with its metrics.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline import command_line
from pipeline.command_line import positive
from pipeline.errors import RunFolderError
from pipeline.files import write_text
from pipeline.run_folder.attempts import NAME as ATTEMPTS
from pipeline.run_folder.status import TRAINING, RunStatus, as_lines, read_status, runs_in
from pipeline.studies.report.page import page, write_pngs
from pipeline.studies.report.runs import Run, read_runs


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of studies or runs")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default report.html)")
    parser.add_argument("--title", default="What was learned, what was forgotten", help="the page's heading")
    parser.add_argument("--beside", type=Path, metavar="STUDY", help="another study, for a table by method")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write the figures there, as PNG files")
    parser.add_argument("--compare", metavar="RUN", help="an earlier run on the same base: its folder, or name")
    parser.add_argument(
        "--watch",
        type=positive,
        nargs="?",
        const=60,
        metavar="SECONDS",
        help="write the page again until runs end (60)",
    )


def main(arguments: argparse.Namespace) -> None:
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    while True:
        unfinished = [read_status(folder) for folder in _unfinished(arguments.runs)]
        try:
            runs = _write(arguments, unfinished)
        except RunFolderError as fault:
            if not arguments.watch or not unfinished:
                raise
            print(f"{fault}; waiting")  # nothing has been validated twice yet
        if not arguments.watch or not unfinished:
            break
        print(as_lines(unfinished))
        time.sleep(arguments.watch)
    for path in write_pngs(runs, arguments.png) if arguments.png else ():
        print(path)


def _write(arguments: argparse.Namespace, unfinished: Sequence[RunStatus]) -> list[Run]:
    runs = read_runs(arguments.runs)
    others = read_runs([arguments.beside]) if arguments.beside else []
    earlier: list[Run] = []
    if arguments.compare:
        beside = arguments.runs[0].resolve().with_name(arguments.compare)
        folder = beside if not Path(arguments.compare).exists() and beside.exists() else Path(arguments.compare)
        if folder.resolve() in [path.resolve() for path in arguments.runs]:
            raise RunFolderError(f"{folder}: expected another run than those of the report; name an earlier one")
        # Both at once: they must have one base, and their names must differ.
        together = read_runs([*arguments.runs, folder])
        runs, earlier = together[: len(runs)], together[len(runs) :]
    reload_s = arguments.watch if unfinished else None
    write_text(arguments.output, page(runs, arguments.title, others, earlier, unfinished, reload_s=reload_s))
    print(arguments.output)
    return runs


def _unfinished(runs: Sequence[Path]) -> list[Path]:
    """The folders of the runs that have begun to train and not ended, also of those in studies."""
    own = [folder for run in runs for folder in (runs_in(run) or [run])]
    return [folder for folder in own if (folder / ATTEMPTS).exists() and not (folder / TRAINING).exists()]


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
