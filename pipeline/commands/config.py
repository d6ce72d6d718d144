"""Shows every setting of a run, or writes a first configuration.

    scale-cpt config show configs/demo_fft.yaml --set schedule.steps=20
    scale-cpt config init --base models/mine --new 'texts/*.jsonl' --old general.jsonl --output my_run.yaml

A first configuration is for --gpus GPUs, or for this machine, and is followed by its dry run.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TypeAlias

import yaml

from pipeline import command_line
from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.files import write_text
from pipeline.sizing.cluster import add_cluster_options, cluster_of

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_SHOW = "    scale-cpt config show configs/demo.yaml --set schedule.steps=20"
_INIT = """\
    scale-cpt config init --base models/mine --new 'texts/*.jsonl' --old general.jsonl --output my_run.yaml
    scale-cpt config init --base org/name --new hf://org/texts --old general.jsonl --gpus 8

A line of a .txt file is a document. Chats, and other documents: `messages_key` or `document` of the corpus, in the file
that is written (docs/data.md)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)
    show = _command(
        commands,
        "show",
        "print every setting, with all that the file extends, and with --set",
        _SHOW,
    )
    command_line.add_run(show)
    init = _command(
        commands, "init", "write a first configuration, with sizes that fit a base and texts", _INIT
    )
    init.add_argument(
        "--base",
        type=Path,
        required=True,
        help="the model that learns: a folder or org/name@revision",
    )
    init.add_argument(
        "--new",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts to learn: files, patterns, hf://org/name",
    )
    init.add_argument(
        "--old", nargs="+", required=True, metavar="FILE", help="texts of what the base knows"
    )
    init.add_argument(
        "--text-key", default="text", help="the key or column that holds the texts (default: text)"
    )
    init.add_argument(
        "--old-text-key", help="that of the texts given as --old (default: as --text-key)"
    )
    init.add_argument(
        "--vocabulary",
        type=Path,
        metavar="DIR",
        help="a tokenizer extended by `scale-cpt vocabulary`",
    )
    init.add_argument(
        "--without-gate",
        action="store_true",
        help="for an export that any server runs: narrower, with self-generated text instead",
    )
    init.add_argument(
        "--output", type=Path, help="the YAML file to write (default: the base's name)"
    )
    add_cluster_options(init)


def main(arguments: argparse.Namespace) -> int:
    if arguments.command == "init":
        return _write_first(arguments)
    values = load_config(arguments.run, arguments.set, base="named").model_dump(mode="json")
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
    return 0


def _command(commands: _Commands, name: str, what: str, text: str) -> argparse.ArgumentParser:
    text = f"{what[0].upper()}{what[1:]}.\n\n{text}"
    return commands.add_parser(
        name, help=what, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _write_first(arguments: argparse.Namespace) -> int:
    """Writes a first configuration, prints its dry run, and returns 1 if that finds a fault."""
    output = arguments.output or Path(f"{arguments.base.resolve().name}.yaml")
    name = re.sub("[^A-Za-z0-9._-]", "-", output.stem)
    if output.exists():
        raise ConfigError(f"{output}: this file exists already; give another one as --output")
    # Imported after the options are checked: torch takes seconds.
    from pipeline.checks.dry_run import make_plan
    from pipeline.sizing.first_config import propose

    cluster = cluster_of(arguments)
    config, text = propose(
        name,
        arguments.base,
        arguments.new,
        arguments.old,
        cluster,
        text_key=arguments.text_key,
        old_text_key=arguments.old_text_key or arguments.text_key,
        vocabulary=arguments.vocabulary,
        gated=not arguments.without_gate,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, text)
    plan = make_plan(config, cluster)
    print(plan, f"wrote {output}", sep="\n\n")
    return 1 if plan.faults else 0
