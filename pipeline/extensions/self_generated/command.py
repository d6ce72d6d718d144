r"""Makes token corpora of text that the base model writes itself.

    scale-cpt sample configs/demo.yaml
    scale-cpt sample --base path/to/model --output tokens/own --tokens 1000000 --max-tokens 2048
    scale-cpt sample --base path/to/chat_model --output tokens/answers --tokens 1000000 \
        --max-tokens 2048 --prompts questions.jsonl --chat-template

With a run, every corpus of role self_generated that it names is made. Without a run, give the base
and the settings: the options have the names and meanings of `data.corpora.<name>.sample` in
docs/configuration.md. Stopped or killed, the same command continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.command_line import (
    add_chat_date_option,
    add_chat_start_option,
    add_run,
    add_share_option,
    add_text_key_option,
    folder_or_hub,
    positive,
)
from pipeline.config.data import Sampling
from pipeline.config.reading import checked
from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.run_folder.run_file import write_new_run
from pipeline.run_folder.serial_stage import serial_stage

if TYPE_CHECKING:
    from pipeline.extensions.self_generated.corpus import SamplingJob

_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser, required=False)
    parser.add_argument(
        "--workers",
        type=positive,
        help="processes, each with the base (default: one for each GPU, or as many as fit)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        help="documents written at a time (default: what suits the base, at most 128)",
    )
    add_share_option(parser)
    group = parser.add_argument_group("without a run")
    group.add_argument("--base", type=folder_or_hub, help="the base model's Hugging Face folder")
    group.add_argument("--output", type=Path, help="the folder of the corpus to make")
    group.add_argument("--tokens", type=positive, help="how many tokens are written, at least")
    group.add_argument(
        "--max-tokens", type=positive, help="the most tokens of a document, with its prompt"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="the temperature of sampling (default: 1, the base's own distribution)",
    )
    group.add_argument(
        "--prompts",
        nargs="+",
        default=[],
        metavar="FILE",
        help="documents whose beginnings the base continues",
    )
    group.add_argument(
        "--prompt-tokens",
        type=positive,
        help="how many tokens of each document are its prompt (default: all of them)",
    )
    add_text_key_option(group)
    group.add_argument(
        "--chat-template",
        action="store_true",
        help="the prompts are a user's messages, framed by the chat template",
    )
    add_chat_date_option(group)
    add_chat_start_option(group)
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the base thinks before it answers (default: as its chat template has it)",
    )
    group.add_argument(
        "--system-prompts",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="system prompts, one of which is drawn for each message",
    )
    group.add_argument("--seed", type=int, default=0, help="the seed of the text (default: 0)")


def main(arguments: argparse.Namespace) -> None:
    if arguments.run:
        _check_no_options_without_run(arguments)
    config = load_config(arguments.run, arguments.set) if arguments.run else None
    if config is not None and not any(corpus.sample for corpus in config.data.corpora.values()):
        return  # Every run of slurm/cpt_korean.sh passes here, without torch.
    sampling = _sampling_of(arguments) if config is None else None
    _logger.info("sampling text that the base writes itself: loading the libraries, then the base")
    from pipeline.data.tokenize.workers import local_workers
    from pipeline.extensions.self_generated.corpus import (
        default_workers,
        plan_of,
        sample_corpus,
        sampling_jobs,
    )

    with serial_stage(config, "sample"):
        jobs: list[SamplingJob] = []
        if config is not None:
            jobs += sampling_jobs(config, arguments.batch_size)
        if sampling is not None:
            jobs.append(_given_job(arguments, sampling))
        # Faults of every job are found before the first one is made.
        plans = [plan_of(job) for job in jobs]
        if config is not None:
            write_new_run(config)
        workers = arguments.workers or default_workers(jobs[0].base)
        # The server of forks loads torch and transformers once for all workers.
        with local_workers(workers, preload="pipeline.extensions.self_generated.corpus") as pool:
            for job, plan in zip(jobs, plans, strict=True):
                manifest = sample_corpus(job, plan, pool, arguments.share)
                tokens = f"{manifest.tokens:,} tokens that the base wrote"
                print(f"{job.output}: {manifest.documents:,} documents, {tokens}")


def _sampling_of(arguments: argparse.Namespace) -> Sampling:
    """The settings that the options give; raises ConfigError where they do not fit together."""
    required = (arguments.base, arguments.output, arguments.tokens, arguments.max_tokens)
    if not all(required):
        raise ConfigError("name a run, or give all of --base, --output, --tokens and --max-tokens")
    given = {name: getattr(arguments, name) for name in Sampling.model_fields}
    return checked(Sampling, given, source="the command line", listed_in="--help")


def _given_job(arguments: argparse.Namespace, sampling: Sampling) -> SamplingJob:
    from pipeline.extensions.self_generated.corpus import SamplingJob

    return SamplingJob(
        arguments.base,
        arguments.output,
        sampling,
        arguments.max_tokens,
        arguments.text_key,
        arguments.batch_size,
        chat_date=arguments.chat_date,
        chat_start=arguments.chat_start,
    )


def _check_no_options_without_run(arguments: argparse.Namespace) -> None:
    """Refuses options that say what is sampled beside a run, which says it itself.

    Raises:
        ConfigError: one is given.
    """
    for name in ("base", "output", "tokens", "max_tokens", "prompts", "prompt_tokens"):
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option}: is for sampling without a run; leave it out, or change the run: --set "
                "data.corpora.<name>.sample.tokens=1000"
            )
