"""Runs studies, and reports what runs learned and forgot.

    python -m studies run studies/configs/korean_quick.yaml
    python -m studies report runs/korean-quick --output report.html

Call it in the project's root. `python -m studies COMMAND --help` explains a command.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pipeline import command_line, log
from pipeline.errors import MissingPackageError
from pipeline.list_options import join_repeated_lists

RUN_HELP = """\
Runs all runs that a study compares, several at a time; prints tables, writes summary.json.

    python -m studies run studies/configs/korean_quick.yaml

Stopped (Ctrl-C) or killed, the same command continues: it skips finished runs. On a cluster
studies/run_study.sh submits every run as a job of its own.
"""
REPORT_HELP = """\
Writes one HTML page that shows what runs learned and forgot: figures, tables, costs.

    python -m studies report runs/korean --output report.html
    python -m studies report runs/demo runs/demo-fft --output report.html --svg figures

A RUN is the folder of a study, with its summary.json, or the folder of a single run, with its
metrics.jsonl. The run may still be training.
"""
_logger = log.get_logger(__name__)


def main() -> None:
    """Runs the command that `sys.argv` names."""
    arguments = build_parser().parse_args(sys.argv[1:] or ["--help"])
    command_line.run_parsed(arguments.main, arguments)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `python -m studies`; each command sets `main`, the function that runs it."""
    parser = argparse.ArgumentParser(
        "python -m studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_report(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help=RUN_HELP.splitlines()[0],
        description=RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    join_repeated_lists(parser)
    parser.set_defaults(main=run)
    parser.add_argument(
        "study", type=Path, help="the study's YAML file, e.g. studies/configs/korean.yaml"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default="examples/data",
        help="the folder of the texts (default: examples/data)",
    )
    parser.add_argument(
        "--jobs",
        type=command_line.positive,
        help="how many runs train at a time (default: as many as the cores hold)",
    )
    parser.add_argument(
        "--due",
        action="store_true",
        help="only list the tasks that can start now: name, configuration, stages",
    )
    parser.add_argument(
        "--ended",
        nargs="*",
        default=[],
        help="with --due: the tasks whose jobs have ended; one that is still due is an error",
    )


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help=REPORT_HELP.splitlines()[0],
        description=REPORT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(main=report)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folders of studies or runs"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the page (default: report.html)"
    )
    parser.add_argument(
        "--title", default="What was learned, what was forgotten", help="the heading of the page"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FOLDER", help="also write the figures there, as SVG files"
    )


def run(arguments: argparse.Namespace) -> None:
    """`python -m studies run`."""
    # After the options: --help does not wait for torch.
    from studies.harness.run_study import open_study, run_study
    from studies.harness.summary import summarise

    runs = open_study(arguments.study, arguments.data)
    if arguments.due:
        for task in runs.pending_tasks(arguments.ended):
            # The job reads the configuration from the run's folder.
            task.run.write()
            # Separated by tabs: the names of folders may contain spaces.
            print(task.name, task.run.path, " ".join(task.stages), sep="\t")
        return
    # A rank takes a core at least; what is over becomes threads.
    cores = len(os.sched_getaffinity(0))
    jobs = arguments.jobs or max(1, cores // runs.study.ranks)
    run_study(runs, jobs)
    print(summarise(runs))
    folder = runs.study.folder
    _logger.info(
        "wrote %s/summary.json; as a page: python -m studies report %s --output %s/report.html",
        folder,
        folder,
        folder,
    )


def report(arguments: argparse.Namespace) -> None:
    """`python -m studies report`."""
    from pipeline.files.publishing import write_text
    from studies.report.results import read_runs

    try:
        # With matplotlib, which the project itself does not need.
        from studies.report.page import page, write_figures
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"report: {error.name} is not installed; pip install -e '.[dev]' in the project's root"
        ) from None

    runs = read_runs(arguments.runs)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output, page(runs, arguments.title))
    print(arguments.output)
    if arguments.svg is not None:
        for path in write_figures(runs, arguments.svg):
            print(path)


if __name__ == "__main__":
    main()
