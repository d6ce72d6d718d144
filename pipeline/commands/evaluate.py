"""Scores models: perplexity, benchmarks, chats, or the final table of a run.

    scale-cpt evaluate --model exported --data examples/data/*/*.heldout.jsonl.zst
    scale-cpt evaluate --model base exported --tasks kobest_copa arc_easy
    scale-cpt evaluate --model base exported --chats chats.jsonl
    scale-cpt evaluate configs/demo.yaml

A model is a Hugging Face folder, or a name on the hub. Several are compared in one table. --tasks
takes the names of lm-eval's tasks; --include-path adds your own tasks.

With a run, its base and its exported model are scored on the held-out texts of the run's corpora,
and on --chats if they are given. The scores are written to <folder>/summary.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

from pipeline import log
from pipeline.command_line import (
    add_run,
    add_text_key_option,
    as_json,
    folder_or_hub,
    named_files,
    non_negative,
    positive,
)
from pipeline.config.run import load_config
from pipeline.data.sources.records import Keys, SpecialTokens
from pipeline.data.tokenize.documents import good_documents
from pipeline.errors import ConfigError
from pipeline.evaluation.evaluator import TEXTS, RunEvaluation, evaluators, run_evaluators
from pipeline.run_folder.serial_stage import serial_stage

_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run(parser, required=False)
    parser.add_argument(
        "--model",
        type=folder_or_hub,
        nargs="+",
        default=[],
        help="Hugging Face folders, or models on the hub",
    )
    _add_evaluators(parser, after="--model")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="texts for perplexity: JSONL, .txt, Parquet, each with a name for the table (default: "
        "the file's)",
    )
    _add_evaluators(parser, after="--data")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python files in a model's folder"
    )
    parser.add_argument(
        "--prefix",
        choices=("document", "none"),
        default="document",
        help="score a text after the tokens that precede a document in training (default), or "
        "after nothing",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_perplexity_options(parser.add_argument_group("perplexity"))
    for evaluator in evaluators().values():
        evaluator.add_options(parser.add_argument_group(evaluator.title))


def _add_evaluators(parser: argparse.ArgumentParser, *, after: str) -> None:
    """Adds the options that choose the evaluators which follow the option `after`."""
    for name, evaluator in evaluators().items():
        if evaluator.after == after:
            parser.add_argument(f"--{name}", nargs="+", default=[], help=evaluator.help)


def _add_perplexity_options(group: argparse._ArgumentGroup) -> None:
    add_text_key_option(group)
    group.add_argument(
        "--prompt-key",
        help="the key or column of a prompt before the text, which is read and not scored",
    )
    group.add_argument(
        "--special-tokens",
        choices=get_args(SpecialTokens),
        help="what a text that spells a special token such as </s> is: text, or that token "
        "(default: text where the tokenizer can)",
    )
    group.add_argument(
        "--context", type=positive, help="tokens in a window (default: the model's, at most 4096)"
    )
    group.add_argument(
        "--max-bytes",
        type=non_negative,
        default=2**17,
        help="bytes scored of each file, at most a sixteenth of them in one document "
        "(default: 131072; 0: all)",
    )


def main(arguments: argparse.Namespace) -> None:
    for_models = [TEXTS, *evaluators()]
    for_runs = run_evaluators()
    if arguments.run:
        without_run = [name for name in for_models if name not in for_runs]
        if arguments.model or any(getattr(arguments, name) for name in without_run):
            raise ConfigError(
                f"a run is scored on its own held-out texts, and on {_options(for_runs, 'and')}; "
                f"to score models on {_options(for_models, 'or')}, name them as --model, without a "
                "run"
            )
        _evaluate_run(arguments)
        return
    scored_on = [name for name in for_models if getattr(arguments, name)]
    if not arguments.model or len(scored_on) != 1:
        raise ConfigError(f"name a run, or --model with one of {_options(for_models, 'and')}")
    models = ", ".join(str(model) for model in arguments.model)
    _logger.info("evaluating %s: loading the libraries, then each model", models)
    from pipeline.hf.load import check_hf_config

    # Each model is checked before the others are scored for hours.
    for model in arguments.model:
        check_hf_config(model, trust_remote_code=arguments.trust_remote_code)
    if arguments.data:
        print(_score_texts(arguments))
    else:
        evaluator = evaluators()[scored_on[0]]
        scores = evaluator.scores(arguments)
        print(as_json(scores) if arguments.json else evaluator.table(scores))


def _options(names: Sequence[str], conjunction: str) -> str:
    """Options for a sentence: `--data, --tasks or --chats`."""
    *others, last = [f"--{name}" for name in names]
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def _evaluate_run(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.run, arguments.set)
    asked: dict[str, RunEvaluation] = {}
    for name in run_evaluators():
        if getattr(arguments, name):
            asked[name] = evaluators()[name].run_evaluation(config, arguments)
    with serial_stage(config, "evaluate"):
        _logger.info(
            "evaluating %s: loading the libraries, then the base and the export", config.folder
        )
        from pipeline.evaluation.summary import summarise

        text = summarise(
            config,
            max_bytes=arguments.max_bytes,
            prefix=arguments.prefix,
            asked=asked,
        )
        print(text)


def _score_texts(arguments: argparse.Namespace) -> str:
    from pipeline.evaluation.perplexity import score_folder
    from pipeline.evaluation.table import score_table

    keys = Keys(arguments.text_key, arguments.prompt_key, special_tokens=arguments.special_tokens)
    files = named_files("--data", arguments.data)
    scores = {}
    for model in arguments.model:
        # Read anew for each model: the documents are iterators, and used up by the one before.
        texts = {name: good_documents([file], keys) for name, file in files.items()}
        scores[str(model)] = score_folder(
            model,
            texts,
            context=arguments.context,
            max_bytes=arguments.max_bytes,
            prefix=arguments.prefix,
            trust_remote_code=arguments.trust_remote_code,
        )
    return as_json(scores) if arguments.json else score_table(scores)
