"""Cleans the corpora of a run that have a section `clean`, before tokenization.

    scale-cpt clean my.yaml
    scale-cpt clean my.yaml --dry-run          what a sample says of the whole
    scale-cpt clean my.yaml --show 20          examples of what each step dropped

On a cluster slurm/clean_corpus.sh runs it as job arrays.

Inputs are never changed: the cleaned text lies in <data.folder>/<name>.clean, which tokenization reads in their place.
"""

from __future__ import annotations

import argparse
import os

from pipeline.command_line import add_run, positive
from pipeline.config.run import load_config
from pipeline.data.tokenize.corpora import cleaned_folder, named_inputs
from pipeline.data.tokenize.units import named_files
from pipeline.errors import MissingPackageError
from pipeline.run_folder.attempts import stage_of


def main(options: argparse.Namespace) -> None:
    config = load_config(options.run, options.set, base="named")
    names = [name for name, corpus in config.data.corpora.items() if corpus.clean]
    if not names:
        return  # every run of slurm/cpt_korean.sh passes here
    try:
        from pipeline.cleaning.clean import clean, estimate, examples, submit, table
        from pipeline.cleaning.stages import cleaning_jobs
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"clean: {error.name} is not installed; pip install 'scale-cpt[clean]'"
        ) from None
    if options.show or options.dry_run:
        for job in cleaning_jobs(config.data):
            shown = (
                examples(job.output, options.show)
                if options.show
                else [estimate(job, options.workers)]
            )
            print("\n".join(shown))
        return
    with stage_of(config, "clean", alone=True):
        if not all(cleaned_folder(config.data, name).is_dir() for name in names):
            from pipeline.checks.checklist import begin  # loads torch

            for files in named_inputs(config.data):
                named_files(files)
            # What tokenization would refuse is found before hours of work.
            ranks = int(os.environ.get("EXPECTED_WORLD_SIZE") or config.parallel.tp_size)
            begin(load_config(options.run, options.set), ranks, "tokenize")
        for job in cleaning_jobs(config.data):
            if options.slurm and not job.output.exists() and not job.work.exists():
                print(f"submitted: job {submit(job, options.slurm, options.time)}")
                return  # a corpus after it leaves out what is in this one
            cleaned = clean(job, options.workers)
            print(f"{table(cleaned.steps)}\n{job.output}: {cleaned.documents:,} documents")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_run(parser)
    add(
        "--workers",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes (default: the cores)",
    )
    add(
        "--show",
        type=positive,
        metavar="N",
        help="only print the beginnings of N documents that each step dropped",
    )
    add(
        "--dry-run",
        action="store_true",
        help="clean a sample of 1 %% only, and say what all will leave and take",
    )
    add(
        "--slurm",
        metavar="PARTITION",
        help="submit the next corpus as job arrays; given again, finish it",
    )
    add("--time", default="24:00:00", help="limit of a task of these (default: 24:00:00)")
