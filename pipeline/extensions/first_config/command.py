"""Write a first configuration, with sizes that fit a base and texts.

    scale-cpt config init --base models/mine --new 'texts/*.jsonl' --old general.jsonl
    scale-cpt config init --base org/name --new hf://org/texts --old general.jsonl --gpus 8

A line of a .txt file is a document; for other documents set `document` of the corpus in the file
that is written (docs/data.md). Chats are given by --old-chats and --new-chats (docs/chat.md).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from pipeline.command_line import positive_number
from pipeline.data.tokenize.input_files import named_files
from pipeline.errors import BaseModelError, ConfigError
from pipeline.files.publishing import make_parent, write_text
from pipeline.hub import model_folder
from pipeline.log import get_logger
from pipeline.sizing.cluster import add_cluster_options, cluster_of

_logger = get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        type=Path,
        required=True,
        help="the model that learns: a folder, or org/name@revision on the hub",
    )
    parser.add_argument(
        "--new",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts to learn: files, patterns, hf://org/name",
    )
    parser.add_argument(
        "--old",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts of what the base knows, to measure what is forgotten: none is trained on",
    )
    parser.add_argument(
        "--text-key", default="text", help="the key or column of the documents (default: text)"
    )
    parser.add_argument(
        "--old-text-key", help="the key or column in the --old texts (default: as --text-key)"
    )
    parser.add_argument(
        "--old-chats",
        nargs="+",
        default=[],
        metavar="FILE",
        help="for a chat model: chats in languages that it knows, which it answers itself",
    )
    parser.add_argument(
        "--new-chats",
        nargs="+",
        default=[],
        metavar="FILE",
        help="for a chat model: chats in the new language, whose answers are learned after the "
        "texts",
    )
    parser.add_argument(
        "--messages-key",
        default="messages",
        help="the key or column of the messages in chats (default: messages)",
    )
    parser.add_argument(
        "--vocabulary",
        type=Path,
        metavar="DIR",
        help="a folder that scale-cpt vocabulary wrote, for a run with new tokens",
    )
    parser.add_argument(
        "--without-gate",
        action="store_true",
        help="a narrower expansion with self-generated text, for an export that any server runs",
    )
    parser.add_argument(
        "--hours",
        type=positive_number,
        help="how long the job may take, which decides how much it reads (default: 24 on CPUs; on "
        "GPUs as long as the texts take)",
    )
    parser.add_argument(
        "--output", type=Path, help="the YAML file to write (default: <name of the base>.yaml)"
    )
    add_cluster_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Writes a first configuration and prints its dry run. Returns 1 if that finds a fault."""
    output = arguments.output or Path(f"{arguments.base.resolve().name}.yaml")
    name = re.sub("[^A-Za-z0-9._-]+", "-", output.stem).lstrip("-._") or "run"
    if output.exists():
        raise ConfigError(f"{output}: this file exists already; give another one as --output")
    make_parent(output)
    for files in (arguments.new, arguments.old, arguments.old_chats, arguments.new_chats):
        named_files(files)
    base = model_folder(arguments.base)
    if not base.is_dir():
        raise BaseModelError(
            f"--base: {base}: no such folder; give a model's folder, or org/name on the hub"
        )
    _logger.info("a first configuration for %s: loading the libraries", arguments.base)
    # After the paths are checked, because torch takes seconds.
    from pipeline.extensions.first_config.propose import propose
    from pipeline.extensions.first_config.wanted import FirstRun

    cluster = cluster_of(arguments)
    wanted = FirstRun(
        name=name,
        base=arguments.base,
        new=arguments.new,
        old=arguments.old,
        text_key=arguments.text_key,
        old_text_key=arguments.old_text_key,
        vocabulary=arguments.vocabulary,
        old_chats=arguments.old_chats,
        new_chats=arguments.new_chats,
        messages_key=arguments.messages_key,
        gated=not arguments.without_gate,
        hours=arguments.hours,
    )
    config, text = propose(wanted, cluster)
    write_text(output, text)
    _logger.info("wrote %s; its dry run follows", output)
    # Not before: the file does not wait for its imports.
    from pipeline.checks.dry_run.make_plan import make_plan

    plan = make_plan(config, cluster)
    print(plan)
    return 1 if plan.faults else 0
