"""Scores models: perplexity, benchmarks, chats, or the final table of a run.

    scale-cpt evaluate --model exported --data examples/data/*/*.heldout.jsonl.zst
    scale-cpt evaluate --model base exported --tasks kobest_copa arc_easy
    scale-cpt evaluate --model base exported --chats chats.jsonl
    scale-cpt evaluate configs/demo.yaml

Several models are compared in one table. --tasks takes lm-eval's names; --include-path adds your own tasks. With a run:
the base and the exported model on the held-out texts of the run's corpora, and on --chats if there are any; writes
<folder>/summary.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import orjson

from pipeline import log
from pipeline.command_line import add_run, day, folder_or_hub, positive
from pipeline.config.data import CHAT_DATE
from pipeline.config.run import load_config
from pipeline.data.sources.records import Keys, SpecialTokens
from pipeline.data.tokenize.units import good_documents
from pipeline.errors import ConfigError
from pipeline.run_folder.attempts import stage_of

_logger = log.get_logger(__name__)


def main(options: argparse.Namespace) -> None:
    given = {name for name in ("run", "model", "tasks", "data", "chats") if getattr(options, name)}
    if given in ({"run"}, {"run", "chats"}):
        config = load_config(options.run, options.set)
        with stage_of(config, "evaluate"):
            _logger.info(
                "evaluating %s: loading the libraries, then the base and the export", config.folder
            )
            from pipeline.evaluation.summary import summarise  # --help needs no torch

            print(
                summarise(
                    config,
                    max_bytes=options.max_bytes,
                    prefix=options.prefix,
                    chats=options.chats,
                    max_answer_tokens=options.max_answer_tokens,
                )
            )
        return
    kinds = {"data": _scores_of_texts, "tasks": _benchmarks, "chats": _scores_of_chats}
    if "model" not in given or len(asked := given & kinds.keys()) != 1 or "run" in given:
        raise ConfigError("name a run, or --model with one of --data, --tasks and --chats")
    _logger.info(
        "evaluating %s: loading the libraries, then each model", ", ".join(map(str, options.model))
    )
    from pipeline.hf.load import check_hf_config

    for model in options.model:  # before the other models have been scored for hours
        check_hf_config(model, trust_remote_code=options.trust_remote_code)
    print(kinds[asked.pop()](options))


def _scores_of_texts(options: argparse.Namespace) -> str:
    from pipeline.evaluation.perplexity import score_folder
    from pipeline.evaluation.table import score_table

    keys = Keys(options.text_key, options.prompt_key, special_tokens=options.special_tokens)
    shared = ("context", "max_bytes", "prefix")
    settings = {name: getattr(options, name) for name in (*shared, "trust_remote_code")}
    scores = {}
    for model in options.model:
        texts = {name: good_documents([name], keys) for name in options.data}
        scores[str(model)] = score_folder(model, texts, **settings)
    return _json(scores) if options.json else score_table(scores)


def _scores_of_chats(options: argparse.Namespace) -> str:
    from pipeline.data.tokenizer.chats import ChatTemplate
    from pipeline.evaluation.chats import chat_rows, read_chats, score_chats
    from pipeline.evaluation.table import table

    chats = read_chats(options.chats)
    for model in options.model:  # as above
        ChatTemplate(model)
    settings = {
        name: getattr(options, name)
        for name in ("max_answer_tokens", "trust_remote_code", "chat_date")
    }
    scores = {str(model): score_chats(model, chats, **settings) for model in options.model}
    return _json(scores) if options.json else table(*chat_rows(scores))


def _benchmarks(options: argparse.Namespace) -> str:
    from pipeline.evaluation.benchmarks import benchmark_model, comparison, load_tasks, task_results

    tasks = load_tasks(
        options.tasks, include=options.include_path, few_shot=options.few_shot, limit=options.limit
    )
    settings = {
        name: getattr(options, name)
        for name in ("batch_size", "prefix", "trust_remote_code", "chat_template")
    }
    framed, results = options.chat_template, {}
    for model in options.model:
        results[str(model)] = task_results(
            benchmark_model(model, **settings), tasks, chat_template=framed
        )
    return _json(results) if options.json else comparison(results)


def _json(values: object) -> str:
    return orjson.dumps(values, option=orjson.OPT_INDENT_2).decode()


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_run(parser, required=False)
    add(
        "--model",
        type=folder_or_hub,
        nargs="+",
        default=[],
        help="Hugging Face folders, or models on the hub",
    )
    add("--tasks", nargs="+", default=[], help="e.g. kobest_boolq kobest_copa arc_easy blimp")
    add("--data", nargs="+", default=[], help="texts: JSONL, .txt, Parquet")
    add(
        "--chats",
        nargs="+",
        default=[],
        help="chats with references: JSONL, the last of `messages` is the reference",
    )
    add("--trust-remote-code", action="store_true", help="run the Python files in a model's folder")
    prefixes = "score a text after what documents follow in training (default), or after nothing"
    add("--prefix", choices=("document", "none"), default="document", help=prefixes)
    add("--json", action="store_true", help="print JSON instead of a table")
    add = parser.add_argument_group("perplexity").add_argument
    add("--text-key", default="text", help="the field of a record that holds its text")
    add(
        "--special-tokens",
        choices=get_args(SpecialTokens),
        help="what a text that spells </s> is: text, or that token (default: text where the tokenizer can)",
    )
    add("--prompt-key", help="the field of a prompt before the text, which is read but not scored")
    add("--context", type=int, help="tokens in a window (default: the model's, at most 4096)")
    add(
        "--max-bytes",
        type=int,
        default=2**17,
        help="of each text, a sixteenth at most of a document (131072; 0: all)",
    )
    add = parser.add_argument_group("benchmarks").add_argument
    add(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="your own lm-eval tasks; RUNS the Python code that they name",
    )
    add(
        "--few-shot",
        type=int,
        choices=range(65),
        metavar="N",
        help="solved examples before each question",
    )
    add(
        "--limit",
        type=positive,
        help="ask only the first questions of each task, at most this many",
    )
    add("--batch-size", type=positive, default=16, help="answers scored at a time (default 16)")
    add(
        "--chat-template",
        action="store_true",
        help="ask as a user does, framed by the tokenizer's chat template",
    )
    add = parser.add_argument_group("chats").add_argument
    add("--chat-date", type=day, default=CHAT_DATE, help="today, to a chat template that asks")
    add(
        "--max-answer-tokens",
        type=positive,
        default=256,
        help="where an answer that does not end is cut (256)",
    )
