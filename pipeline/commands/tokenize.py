"""Makes token corpora of documents: Megatron's .bin/.idx, with a manifest.

    scale-cpt tokenize configs/demo.yaml
    scale-cpt tokenize --input 'corpus/*.jsonl.zst' --tokenizer path/to/model --output tokens/korean
    scale-cpt tokenize --import megatron/my_text_document --tokenizer path/to/model --output tokens

With a run, every corpus that it names is made, with the run's tokenizer. Without a run, give the
input. Stopped or killed, the same command continues. On a cluster slurm/tokenize_korean.sh runs it
as a job array, or over MPI ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pipeline import log
from pipeline.command_line import (
    add_chat_date_option,
    add_chat_start_option,
    add_run,
    add_share_option,
    add_text_key_option,
    folder_or_hub,
    fraction,
    mebibytes,
    positive,
)
from pipeline.config.data import Corpus
from pipeline.config.reading import checked
from pipeline.config.run import RunConfig, load_config
from pipeline.data.sources.records import DocumentUnit, Normalization, Quoting, SpecialTokens
from pipeline.data.tokenize.corpora import Job, cleaned_folder, corpus_jobs, is_tokenized
from pipeline.data.tokenize.input_files import TOKENS, named_files
from pipeline.data.tokenize.job import preprocess, remarks
from pipeline.data.tokenize.workers import local_workers, mpi_share
from pipeline.errors import ConfigError, DataError
from pipeline.run_folder.run_file import goes_on_otherwise, write_new_run
from pipeline.run_folder.serial_stage import serial_stage

_CORPUS_OPTIONS = (
    "text_key",
    "prompt_key",
    "messages_key",
    "document",
    "encoding",
    "heldout_fraction",
    "quoting",
    "normalize",
    "special_tokens",
    "max_unknown_fraction",
    "allow_damaged",
)
"""The options that are settings of a corpus, by the same name."""

_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser, required=False)
    _add_input_options(parser.add_argument_group("without a run"))
    _add_work_options(parser.add_argument_group("how the work is done"))


def _add_input_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        default=[],
        metavar="FILE",
        help="documents: files, patterns, URLs such as s3://bucket/*.parquet, hf://org/name",
    )
    group.add_argument(
        "--import",
        nargs="+",
        default=[],
        dest="imported",
        metavar="PREFIX",
        help="instead of --input: PREFIX.bin and PREFIX.idx of Megatron-LM's preprocess_data, made "
        "with this tokenizer",
    )
    group.add_argument(
        "--tokenizer",
        type=folder_or_hub,
        help="a Hugging Face folder, a tokenizer.json or a SentencePiece .model",
    )
    group.add_argument(
        "--output", type=Path, help="the corpus folder; its held-out part goes to OUTPUT.heldout"
    )
    add_text_key_option(group)
    group.add_argument(
        "--prompt-key",
        help="the key or column of a prompt before the text, which is read and never predicted",
    )
    group.add_argument(
        "--messages-key",
        help="instead of --text-key: the key or column of a chat, of {role, content} or "
        "{from, value}, in which the assistant's messages are predicted",
    )
    add_chat_date_option(group)
    add_chat_start_option(group)
    group.add_argument(
        "--document",
        choices=get_args(DocumentUnit),
        default="line",
        help="what a document is in .txt files (default: line)",
    )
    group.add_argument(
        "--encoding",
        help="the encoding of text files that are not UTF-8, such as cp949 or utf-16",
    )
    group.add_argument(
        "--quoting",
        choices=get_args(Quoting),
        help="how CSV and TSV files quote (default: standard for CSV, none for TSV)",
    )
    group.add_argument(
        "--normalize",
        choices=get_args(Normalization),
        help="the form of Unicode that texts are brought to (default: none)",
    )
    group.add_argument(
        "--special-tokens",
        choices=get_args(SpecialTokens),
        help="what a text that spells a special token such as </s> becomes: text, or that token "
        "(default: text where the tokenizer can)",
    )
    group.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="the token after every document (default: the tokenizer's eos)",
    )
    group.add_argument(
        "--heldout-fraction",
        type=float,
        default=0.0,
        help="the part of the documents that is held out, chosen by hash (default: 0)",
    )
    group.add_argument(
        "--max-unknown-fraction",
        type=float,
        default=0.01,
        help="stop where the tokenizer cannot spell more of the text than this (default: 0.01)",
    )
    group.add_argument(
        "--allow-damaged",
        action="store_true",
        help="of a truncated or damaged file, read what precedes the damage",
    )


def _add_work_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-bad-fraction",
        type=fraction,
        default=0.01,
        help="stop where more of the records than this are bad (default: 0.01)",
    )
    group.add_argument(
        "--workers",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes (default: one for each core)",
    )
    add_share_option(group)
    group.add_argument(
        "--mpi",
        action="store_true",
        help="this is a rank of an MPI job (srun, mpirun), and does its share",
    )
    group.add_argument(
        "--reference-only",
        action="store_true",
        help="encode with the reference library instead of gigatoken",
    )
    group.add_argument(
        "--unit-mib",
        type=mebibytes,
        dest="unit_bytes",
        metavar="MIB",
        help="MiB of text in a unit of work (default: 4 to 64, by the size of the input)",
    )


def main(arguments: argparse.Namespace) -> None:
    share = mpi_share() if arguments.mpi else arguments.share
    # Over MPI, rank 0 alone records the stage and prints; without MPI, each job does.
    is_first = not arguments.mpi or share[0] == 0
    if not is_first:
        log.configure(logging.WARNING)
    # An MPI rank is a worker itself.
    workers = 1 if arguments.mpi else arguments.workers
    with local_workers(workers, isolated=not arguments.mpi) as pool:
        config = load_config(arguments.run, arguments.set) if arguments.run else None
        with serial_stage(config if is_first else None, "tokenize"):
            jobs = _jobs_of_run(config) if config is not None else [_given_job(arguments)]
            # A missing file is found before hours of work.
            for job in jobs:
                named_files(job.corpus.input)
            if config is not None:
                write_new_run(config)
            for job in jobs:
                job = replace(job, reference_only=arguments.reference_only)
                if arguments.unit_bytes is not None:
                    job = replace(job, unit_bytes=arguments.unit_bytes)
                manifest = preprocess(
                    job, pool, max_bad_fraction=arguments.max_bad_fraction, share=share
                )
                if is_first:
                    rejected = sum(manifest.rejected.values())
                    made = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens"
                    line = f"{job.output}: {made}, {rejected:,} records rejected"
                    print("; ".join([line, *remarks(manifest)]))


def _jobs_of_run(config: RunConfig) -> list[Job]:
    """The corpora of a run. Its checks are made first, unless the run goes on as it was."""
    # slurm/cpt_korean.sh says how many ranks will train on the tokens.
    ranks = int(os.environ.get("EXPECTED_WORLD_SIZE") or config.parallel.fewest_ranks)
    # Every restart of a run passes here, without torch.
    if is_tokenized(config.data):
        if goes_on_otherwise(config):
            # A setting that training would refuse is told before the finished stages are walked.
            from pipeline.checks.checklist import check_stage

            check_stage(config, ranks, "train")
    else:
        for name, corpus in config.data.corpora.items():
            if corpus.clean is not None and not cleaned_folder(config.data, name).is_dir():
                raise DataError(
                    f"data.corpora.{name}: has a section `clean`; run scale-cpt clean first"
                )
        _logger.info("tokenizing %s: loading the libraries, then checking the run", config.name)
        from pipeline.checks.checklist import check_stage  # Here, because it loads torch.

        check_stage(config, ranks, "tokenize")
    return list(corpus_jobs(config.data, config.tokenizer))


def _given_job(arguments: argparse.Namespace) -> Job:
    """The corpus that the options describe."""
    inputs = list(arguments.input)
    for prefix in arguments.imported:
        inputs.append(f"{prefix.removesuffix(TOKENS)}{TOKENS}")
    if not (inputs and arguments.tokenizer and arguments.output):
        raise ConfigError("name a run, or give --input or --import, with --tokenizer and --output")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in _CORPUS_OPTIONS}
    given["input"] = inputs
    corpus = checked(Corpus, given, source="the command line", listed_in="--help")
    return Job(
        corpus,
        arguments.tokenizer,
        arguments.output,
        arguments.end_of_document,
        chat_date=arguments.chat_date,
        chat_start=arguments.chat_start,
    )
