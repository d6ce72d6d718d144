"""Makes token corpora (Megatron's .bin/.idx with a manifest) of documents; can be restarted.

    scale-cpt tokenize configs/demo.yaml
    scale-cpt tokenize --import megatron/my_text_document --tokenizer path/to/model --output tokens/mine
    scale-cpt tokenize --input 'corpus/*.jsonl.zst' --tokenizer path/to/model --output tokens/korean

Give the input, or a run configuration: then every corpus that it names is made, with the run's tokenizer.
"""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

from pipeline import log
from pipeline.command_line import add_run, day, folder_or_hub, positive, run_program, share
from pipeline.config.data import CHAT_DATE, Corpus
from pipeline.config.reading import checked
from pipeline.config.run import RunConfig, load_config
from pipeline.data.sources.records import DocumentUnit, Normalization, Quoting, SpecialTokens
from pipeline.data.tokenize.corpora import Job, cleaned_folder, corpus_jobs, is_tokenized
from pipeline.data.tokenize.job import preprocess, remarks
from pipeline.data.tokenize.units import TOKENS, named_files
from pipeline.data.tokenize.workers import local_workers, mpi_share
from pipeline.errors import ConfigError, DataError
from pipeline.run_folder.attempts import begin_run, stage_of


def main(options: argparse.Namespace) -> None:
    work = mpi_share() if options.mpi else options.share
    is_first = not options.mpi or work[0] == 0
    if not is_first:
        log.configure(logging.WARNING)
    with local_workers(1 if options.mpi else options.workers, isolated=not options.mpi) as workers:
        config = load_config(options.run, options.set) if options.run else None
        with stage_of(config if is_first else None, "tokenize"):
            jobs = [_given(options)] if config is None else _of_run(config)
            for job in jobs:  # a missing file is found before hours of work
                named_files(job.corpus.input)
            if config is not None:
                begin_run(config)
            unit_bytes = int(options.unit_mib * 2**20) if options.unit_mib else None
            for job in jobs:
                job = replace(job, unit_bytes=unit_bytes, reference_only=options.reference_only)
                manifest = preprocess(
                    job, workers, max_bad_fraction=options.max_bad_fraction, share=work
                )
                rejected = sum(manifest.rejected.values())
                made = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, {rejected:,} records rejected"
                if is_first:
                    print("; ".join([f"{job.output}: {made}", *remarks(manifest)]))


def _of_run(config: RunConfig) -> list[Job]:
    if not is_tokenized(config.data):  # every restart of a run passes this stage
        for name, corpus in config.data.corpora.items():
            if corpus.clean is not None and not cleaned_folder(config.data, name).is_dir():
                raise DataError(
                    f"data.corpora.{name}: has a section `clean`; run scale-cpt clean first"
                )
        from pipeline.checks.checklist import begin  # loads torch

        # cpt_korean.sh knows how many ranks will train on the tokens.
        begin(
            config,
            int(os.environ.get("EXPECTED_WORLD_SIZE") or config.parallel.tp_size),
            "tokenize",
        )
    return list(corpus_jobs(config.data, config.tokenizer))


def _given(options: argparse.Namespace) -> Job:
    inputs = [
        *options.input,
        *(f"{prefix.removesuffix(TOKENS)}{TOKENS}" for prefix in options.imported),
    ]
    if not (inputs and options.tokenizer and options.output):
        raise ConfigError("name a run, or give --input or --import, with --tokenizer and --output")
    names = (
        "text_key", "prompt_key", "messages_key", "document", "encoding", "heldout_fraction", "quoting", "normalize",
        "special_tokens", "max_unknown_fraction", "allow_damaged",
    )  # fmt: skip
    given = {"input": inputs, **{name: getattr(options, name) for name in names}}
    corpus = checked(Corpus, given, source="the command line", listed_in="--help")
    return Job(
        corpus,
        options.tokenizer,
        options.output,
        options.end_of_document,
        chat_date=options.chat_date,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_run(parser, required=False)
    add(
        "--input",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files, patterns, URLs such as s3://bucket/*.parquet, hf://org/name",
    )
    add(
        "--import",
        nargs="+",
        default=[],
        dest="imported",
        metavar="PREFIX",
        help="instead of --input: PREFIX.bin and PREFIX.idx of Megatron-LM's preprocess_data, made with that tokenizer",
    )
    add(
        "--tokenizer",
        type=folder_or_hub,
        help="a Hugging Face folder, a tokenizer.json or a SentencePiece .model",
    )
    add("--output", type=Path, help="the corpus folder; its held-out part goes to OUTPUT.heldout")
    add(
        "--text-key",
        default="text",
        help="the key or column that holds the document (default: text)",
    )
    add(
        "--messages-key",
        help="or that of a chat, of {role, content} or {from, value}: predicts the assistant's",
    )
    add("--chat-date", type=day, default=CHAT_DATE, help="today, to a chat template that asks")
    add(
        "--encoding",
        help="of text files that are not UTF-8, as Python names it, such as cp949 or utf-16",
    )
    add(
        "--quoting",
        choices=get_args(Quoting),
        help="of CSV and TSV (default: standard for CSV, none for TSV)",
    )
    add(
        "--normalize",
        choices=get_args(Normalization),
        help="bring texts to that form of Unicode (default: none)",
    )
    add(
        "--special-tokens",
        choices=get_args(SpecialTokens),
        help="what a text that spells </s> becomes: text, or that token (default: text where the tokenizer can)",
    )
    add(
        "--max-unknown-fraction",
        type=float,
        default=0.01,
        help="stop where the tokenizer cannot spell more of the text (default: 0.01)",
    )
    add(
        "--allow-damaged",
        action="store_true",
        help="read what precedes the damage of a truncated or damaged file",
    )
    add(
        "--document",
        choices=get_args(DocumentUnit),
        default="line",
        help="a document in .txt files (default: line)",
    )
    add(
        "--prompt-key",
        help="the key or column of a prompt before it, which is read but never predicted",
    )
    add(
        "--heldout-fraction",
        type=float,
        default=0.0,
        help="of the documents, chosen by hash (default: 0)",
    )
    add(
        "--end-of-document",
        metavar="TOKEN",
        help="the token after every document, if not the tokenizer's own eos",
    )
    add(
        "--max-bad-fraction",
        type=float,
        default=0.01,
        help="stop when more records are bad (default: 0.01)",
    )
    add(
        "--workers",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes (default: this machine's cores)",
    )
    add(
        "--share",
        type=share,
        default=(0, 1),
        metavar="K/N",
        help="this is the K-th of N jobs, as in a Slurm array",
    )
    add(
        "--reference-only",
        action="store_true",
        help="do not use gigatoken: encode with the reference library",
    )
    add(
        "--mpi",
        action="store_true",
        help="this is a rank of an MPI job (srun, mpirun), and does its share",
    )
    add(
        "--unit-mib",
        type=float,
        help="MiB of text in a unit of work (default: 4 to 64, by the size of the input)",
    )


if __name__ == "__main__":
    run_program(add_options, main, __doc__)
