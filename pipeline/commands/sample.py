"""Makes token corpora of text that the base model writes itself.

    scale-cpt sample configs/….yaml
    scale-cpt sample --base path/to/model --output tokens/own --tokens 1000000 --max-tokens 2048

With a run's configuration, every corpus of role self_generated that it names is made; without one, give the base and the
settings, which are those of `data.corpora.<name>.sample` in docs/configuration.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.command_line import add_run, day, folder_or_hub, positive, share
from pipeline.config.data import CHAT_DATE, Sampling
from pipeline.config.reading import checked
from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.run_folder.attempts import begin_run, stage_of

if TYPE_CHECKING:
    from pipeline.self_generated.corpus import SamplingJob

_logger = log.get_logger(__name__)


def main(options: argparse.Namespace) -> None:
    config = load_config(options.run, options.set) if options.run else None
    if config is not None and not any(corpus.sample for corpus in config.data.corpora.values()):
        return  # before torch is imported: every run of slurm/cpt_korean.sh passes here
    sampling = _sampling_of(options) if config is None else None
    _logger.info("sampling text that the base writes itself: loading the libraries, then the base")
    from pipeline.data.tokenize.workers import local_workers
    from pipeline.self_generated.corpus import (
        default_workers,
        plan_of,
        sample_corpus,
        sampling_jobs,
    )

    with stage_of(config, "sample"):
        if config is not None:
            jobs = list(sampling_jobs(config, options.batch_size))
        else:
            assert sampling is not None
            jobs = [_given(options, sampling)]
        plans = [plan_of(job) for job in jobs]
        if config is not None:
            begin_run(config)
        count = options.workers or default_workers(jobs[0].base)
        with local_workers(count, preload="pipeline.self_generated.corpus") as workers:
            for job, plan in zip(jobs, plans, strict=True):
                manifest = sample_corpus(job, plan, workers, options.share)
                print(
                    f"{job.output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens that the base wrote"
                )


def _sampling_of(options: argparse.Namespace) -> Sampling:
    """What the flags say of the sampling; raises ConfigError where they do not fit together."""
    if not (options.base and options.output and options.tokens and options.max_tokens):
        raise ConfigError("name a run, or give all of --base, --output, --tokens and --max-tokens")
    given = {name: getattr(options, name) for name in Sampling.model_fields}
    return checked(Sampling, given, source="the command line", listed_in="--help")


def _given(options: argparse.Namespace, sampling: Sampling) -> SamplingJob:
    from pipeline.self_generated.corpus import SamplingJob

    return SamplingJob(
        options.base,
        options.output,
        sampling,
        options.max_tokens,
        options.text_key,
        options.batch_size,
        chat_date=options.chat_date,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_run(parser, required=False)
    add(
        "--workers",
        type=positive,
        help="processes, each with the base (default: one per GPU, or as many as fit)",
    )
    add(
        "--batch-size",
        type=positive,
        help="documents at a time (default: what suits the base, at most 128)",
    )
    add(
        "--share",
        type=share,
        default=(0, 1),
        metavar="K/N",
        help="this is the K-th of N jobs, as in a Slurm array",
    )
    add("--base", type=folder_or_hub, help="a Hugging Face folder")
    add("--output", type=Path, help="the corpus folder")
    add("--tokens", type=positive, help="how many are written, at least")
    add("--max-tokens", type=positive, help="tokens of a document, its prompt included")
    add("--temperature", type=float, default=1.0, help="default: 1, the base's own distribution")
    add(
        "--prompts",
        nargs="+",
        default=[],
        metavar="FILE",
        help="documents whose beginnings the base continues",
    )
    add(
        "--prompt-tokens",
        type=positive,
        help="the beginning of each that is used (default: all of it)",
    )
    add("--text-key", default="text", help="the key or column that holds them (default: text)")
    add(
        "--chat-template",
        action="store_true",
        help="they are a user's messages, framed by the chat template",
    )
    add("--chat-date", type=day, default=CHAT_DATE, help="today, to a chat template that asks")
    add(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the base thinks before it answers",
    )
    add(
        "--system-prompts",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="one is drawn for each message",
    )
    add("--seed", type=int, default=0, help="of the text (default: 0)")
