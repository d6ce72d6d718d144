"""Cleans the corpora of a run that have a section `clean`, before tokenization.

    scale-cpt clean my.yaml
    scale-cpt clean my.yaml --dry-run          estimate from a sample what is dropped, and the time
    scale-cpt clean my.yaml --show 20          examples of what each step dropped

Stopped or killed, the same command continues. On a cluster slurm/clean_corpus.sh runs it as job
arrays.

Inputs are never changed: the cleaned text lies in <data.folder>/<name>.clean, which tokenization
reads in their place.
"""

from __future__ import annotations

import argparse
import os

from pipeline.command_line import add_run, positive
from pipeline.config.run import RunConfig, load_config
from pipeline.data.tokenize.corpora import cleaned_folder, named_inputs
from pipeline.data.tokenize.input_files import named_files
from pipeline.errors import MissingPackageError
from pipeline.log import get_logger
from pipeline.run_folder.serial_stage import serial_stage

_logger = get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--workers",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes (default: one for each core)",
    )
    parser.add_argument(
        "--show",
        type=positive,
        metavar="N",
        help="only print the beginnings of N documents that each step dropped",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="clean a sample of 1 %% only, and estimate what is dropped, and the time for all",
    )
    parser.add_argument(
        "--slurm",
        metavar="PARTITION",
        help="submit the next corpus as job arrays; given again, finish it",
    )
    parser.add_argument(
        "--time",
        default="24:00:00",
        help="the time limit of a task of the arrays (default: 24:00:00)",
    )


def main(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.run, arguments.set, base="named")
    names = [name for name, corpus in config.data.corpora.items() if corpus.clean]
    if not names:
        return  # Every run of slurm/cpt_korean.sh passes here.
    _logger.info("cleaning of %s: loading the libraries", ", ".join(names))
    try:
        from pipeline.extensions.cleaning.clean import estimate, examples
        from pipeline.extensions.cleaning.stages import cleaning_jobs
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"clean: {error.name} is not installed; pip install 'scale-cpt[clean]'"
        ) from None
    if arguments.show:
        for job in cleaning_jobs(config.data):
            print("\n".join(examples(job.output, arguments.show)))
    elif arguments.dry_run:
        for job in cleaning_jobs(config.data):
            print(estimate(job, arguments.workers))
    else:
        with serial_stage(config, "clean", locked=True):
            if not all(cleaned_folder(config.data, name).is_dir() for name in names):
                _check_tokenization(config, arguments)
            _clean(config, arguments)


def _check_tokenization(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Makes the checks of the next stage, so that a fault is found before hours of cleaning."""
    from pipeline.checks.checklist import check_stage  # Here, because it loads torch.

    for files in named_inputs(config.data):
        named_files(files)
    # slurm/cpt_korean.sh says how many ranks will train on the tokens.
    ranks = int(os.environ.get("EXPECTED_WORLD_SIZE") or config.parallel.fewest_ranks)
    check_stage(load_config(arguments.run, arguments.set), ranks, "tokenize")


def _clean(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Cleans each corpus, or, with --slurm, finishes what is submitted and submits the next."""
    from pipeline.extensions.cleaning.clean import clean, submit, table
    from pipeline.extensions.cleaning.stages import cleaning_jobs

    for job in cleaning_jobs(config.data):
        if arguments.slurm and not job.output.exists() and not job.work.exists():
            number = submit(job, arguments.slurm, arguments.time)
            print(f"submitted: job {number}")
            return  # A later corpus leaves out what this one holds, so it must wait for it.
        cleaned = clean(job, arguments.workers)
        print(table(cleaned.steps))
        print(f"{job.output}: {cleaned.documents:,} documents")
