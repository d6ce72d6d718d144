"""Shows every setting of a run, or writes a first configuration.

    scale-cpt config show configs/demo_fft.yaml --set schedule.steps=20
    scale-cpt config init --base models/mine --new 'texts/*.jsonl' --old general.jsonl --gpus 8

With `show`, the groups of parameters, each with its learning rate and weight decay, follow as
comments. With `init`, the configuration is made for --gpus GPUs, or else for this machine, and its
dry run is printed too.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TypeAlias

import yaml

from pipeline import command_line
from pipeline.config.run import RunConfig, load_config
from pipeline.data.tokenize.input_files import named_files
from pipeline.errors import BaseModelError, ConfigError, UserError
from pipeline.files.publishing import write_text
from pipeline.hub import model_folder
from pipeline.log import get_logger
from pipeline.sizing.cluster import add_cluster_options, cluster_of

_logger = get_logger(__name__)
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_SHOW = "    scale-cpt config show configs/demo.yaml --set schedule.steps=20"
_INIT = """\
    scale-cpt config init --base models/mine --new 'texts/*.jsonl' --old general.jsonl
    scale-cpt config init --base org/name --new hf://org/texts --old general.jsonl --gpus 8

A line of a .txt file is a document; for other documents set `document` of the corpus in the file
that is written (docs/data.md). Chats are given by --old-chats and --new-chats (docs/chat.md)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)
    show = _command(
        commands,
        "show",
        "print every setting of a run: its file, the files that it extends, and --set",
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
        help="the model that learns: a folder, or org/name@revision on the hub",
    )
    init.add_argument(
        "--new",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts to learn: files, patterns, hf://org/name",
    )
    init.add_argument(
        "--old",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts of what the base knows, to measure what is forgotten: none is trained on",
    )
    init.add_argument(
        "--text-key", default="text", help="the key or column of the documents (default: text)"
    )
    init.add_argument(
        "--old-text-key", help="the key or column in the --old texts (default: as --text-key)"
    )
    init.add_argument(
        "--old-chats",
        nargs="+",
        default=[],
        metavar="FILE",
        help="for a chat model: chats in languages that it knows, which it answers itself",
    )
    init.add_argument(
        "--new-chats",
        nargs="+",
        default=[],
        metavar="FILE",
        help="for a chat model: chats in the new language, whose answers are learned after the "
        "texts",
    )
    init.add_argument(
        "--messages-key",
        default="messages",
        help="the key or column of the messages in chats (default: messages)",
    )
    init.add_argument(
        "--vocabulary",
        type=Path,
        metavar="DIR",
        help="a folder that scale-cpt vocabulary wrote, for a run with new tokens",
    )
    init.add_argument(
        "--without-gate",
        action="store_true",
        help="a narrower expansion with self-generated text, for an export that any server runs",
    )
    init.add_argument(
        "--hours",
        type=command_line.positive_number,
        help="how long the job may take, which decides how much it reads (default: 24 on CPUs; on "
        "GPUs as long as the texts take)",
    )
    init.add_argument(
        "--output", type=Path, help="the YAML file to write (default: <name of the base>.yaml)"
    )
    add_cluster_options(init)


def main(arguments: argparse.Namespace) -> int:
    if arguments.command == "init":
        return _write_first(arguments)
    config = load_config(arguments.run, arguments.set, base="named")
    values = config.model_dump(mode="json")
    groups = _group_lines(config)
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
    for line in groups:
        print(f"# {line}".rstrip())
    return 0


def _command(
    commands: _Commands, name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    """Adds a command, whose help is its summary and its examples."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _group_lines(config: RunConfig) -> list[str]:
    """The table of groups of parameters, or why it is not known here.

    Raises:
        ConfigError: a factor of the schedule is for parameters that are not there.
    """
    if not config.base.is_dir():
        return [
            f"groups of parameters: unknown, because {config.base} is not on this machine; "
            "see scale-cpt train --dry-run --base-config"
        ]
    _logger.info("groups of parameters: loading the libraries")
    # After the configuration is checked, because torch takes seconds.
    from pipeline.checks.inputs import RunInputs
    from pipeline.methods.parameter_groups import group_lines

    inputs = RunInputs(config, world_size=config.parallel.fewest_ranks)
    try:
        _ = inputs.fitting_spec
    except UserError as error:
        return [f"groups of parameters: unknown: {error}"]
    return ["groups of parameters:", *group_lines(inputs.parameter_groups)]


def _write_first(arguments: argparse.Namespace) -> int:
    """Writes a first configuration and prints its dry run. Returns 1 if that finds a fault."""
    output = arguments.output or Path(f"{arguments.base.resolve().name}.yaml")
    name = re.sub("[^A-Za-z0-9._-]", "-", output.stem)
    if output.exists():
        raise ConfigError(f"{output}: this file exists already; give another one as --output")
    for files in (arguments.new, arguments.old, arguments.old_chats, arguments.new_chats):
        named_files(files)
    base = model_folder(arguments.base)
    if not base.is_dir():
        raise BaseModelError(
            f"--base: {base}: no such folder; give a model's folder, or org/name on the hub"
        )
    _logger.info("a first configuration for %s: loading the libraries", arguments.base)
    # After the paths are checked, because torch takes seconds.
    from pipeline.sizing.first_config.propose import propose
    from pipeline.sizing.first_config.wanted import FirstRun

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
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, text)
    _logger.info("wrote %s; its dry run follows", output)
    # Not before: the file does not wait for its imports.
    from pipeline.checks.dry_run.make_plan import make_plan

    plan = make_plan(config, cluster)
    print(plan)
    return 1 if plan.faults else 0
