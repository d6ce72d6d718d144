"""The commands of scale-cpt: a module each.

A command's module has a docstring, which is its help, `add_options(parser)`, and
`main(arguments)`, which returns the exit code, or None for 0. `pipeline.cli` calls them. The core's
are the modules of this package; extensions have others (`pipeline.extension`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from pipeline import __version__
from pipeline.errors import CONFIG_ERROR, ExtensionError, did_you_mean
from pipeline.extension import Command, extensions
from pipeline.installation import locate_docs
from pipeline.list_options import join_repeated_lists

PROGRAM = "scale-cpt"

# In the order of `scale-cpt --help`; those of extensions come between them. The summaries are here,
# and not only in the docstrings of the modules, so that the list waits for no import.
_CORE_COMMANDS = {
    # The stages of a run.
    "config": "Shows every setting of a run, or writes a first configuration.",
    "tokenize": "Makes token corpora of documents: Megatron's .bin/.idx, with a manifest.",
    "upscale": "Computes the initial expansion of a base model, once, for any parallel layout.",
    "train": "Trains a run, from its newest checkpoint on.",
    "convert": "Converts a checkpoint to a Hugging Face folder, and verifies it.",
    "evaluate": "Scores models: perplexity, benchmarks, chats, or the final table of a run.",
    # Before a run.
    "new": "Makes a folder to work in: configurations, batch scripts, the demo's model and texts.",
    "try": "Goes through every stage of a run's job in 20 steps, in a folder of its own.",
    "estimate": "Estimates memory, traffic, FLOPs and time of a run, and recommends a layout.",
    "tokenizer": "Trains a SentencePiece tokenizer, or converts one, and compares tokenizers.",
    "vocabulary": "Adds tokens for a new language to a base's tokenizer.",
    # A run that has begun.
    "status": "Prints a run's state: running, waiting, done or failed; progress, speed and end.",
    "inspect": "Prints a checkpoint's method, widths, base, step and trained share.",
    "inspect-data": "Shows what a token corpus holds, and checks it against its manifest.",
    # For scripts and shells.
    "may-retry": "Decides whether a stage that ended is retried, and records its end.",
    "describe-config": "Prints every setting of a run, with type, default and meaning.",
    "completion": "Prints a script with which bash or zsh completes commands and options.",
}


_MODULES = {"try": "try_run"}
"""Modules whose names are not those of their commands: try is a word of Python."""


_CORE_SUBCOMMANDS = {"config show": "pipeline.commands.config"}
"""The core's commands of two words, each with its module. To the command of the first word
extensions may add others, such as `config init`."""


def all_commands() -> Mapping[str, Command]:
    """The commands of the core and of the installed extensions, in the order of `--help`.

    Raises:
        ExtensionError: an extension cannot be used, or two have a command of one name.
    """
    return {name: command for name, command in _offered().items() if " " not in name}


def subcommands(command: str) -> Mapping[str, Command]:
    """What extensions add to a command of the core, by the second word; raises the same."""
    found: dict[str, Command] = {}
    for name, added in _offered().items():
        first, _, second = name.partition(" ")
        if second and first == command:
            found[second] = added
    return found


@cache
def _offered() -> Mapping[str, Command]:
    """All commands, those of two words too; raises as `all_commands`."""
    commands: dict[str, Command] = {}
    previous = ""
    for name, summary in _CORE_COMMANDS.items():
        module = f"pipeline.commands.{_MODULES.get(name, name.replace('-', '_'))}"
        commands[name] = Command(summary, module, after=previous)
        previous = name
    with_others = {name.partition(" ")[0] for name in _CORE_SUBCOMMANDS}
    for extension in extensions():
        for name, command in extension.commands().items():
            if name in commands or name in _CORE_SUBCOMMANDS:
                module = _CORE_SUBCOMMANDS.get(name) or commands[name].module
                raise ExtensionError(
                    f"extension {extension.name}: its command {name} is there already, as "
                    f"{module}; give it another name"
                )
            first, has_second, _ = name.partition(" ")
            if has_second and first not in with_others:
                raise ExtensionError(
                    f"extension {extension.name}: its command {name}: expected one word, or "
                    f"{' or '.join(sorted(with_others))} and a word; give it another name"
                )
            commands = _inserted(commands, name, command)
    return commands


def _inserted(commands: Mapping[str, Command], name: str, added: Command) -> dict[str, Command]:
    """`commands` with one more, behind the one that it follows, or at the end."""
    ordered: dict[str, Command] = {}
    for other, command in commands.items():
        ordered[other] = command
        if other == added.after:
            ordered[name] = added
    ordered.setdefault(name, added)
    return ordered


class _Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line: what is wrong, and where help is."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        join_repeated_lists(self)

    def error(self, message: str) -> NoReturn:
        self.exit(CONFIG_ERROR, f"error: {self.prog}: {message}; see {self.prog} --help\n")

    # argparse's own check, which lists the choices and suggests none.
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise argparse.ArgumentError(
            action, f"invalid choice: {value!r}{hint}; choose from {', '.join(choices)}"
        )

    # The parser of a command refuses what it does not know itself. argparse would leave it to the
    # parser of scale-cpt, which knows no command's options.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            options = re.findall(r"--[a-z][a-z-]*", self.format_help())
            self.error(f"unknown argument: {unknown[0]}{did_you_mean(name, options)}")
        return parsed, unknown


def build_parser(with_options: Iterable[str] | None = None) -> argparse.ArgumentParser:
    """The parser of `scale-cpt`.

    Args:
        with_options: the commands that are imported and get their options; None: all. The others
            are only listed.
    """
    parser = _Parser(PROGRAM, epilog=f"{PROGRAM} COMMAND --help: its options")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands = all_commands()
    wanted = set(commands if with_options is None else with_options)
    for name, command in commands.items():
        subparser = subparsers.add_parser(
            name,
            help=command.summary.replace("%", "%%"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in wanted:
            module = load(name)
            subparser.description = locate_docs(module.__doc__ or "")
            module.add_options(subparser)
            subparser.set_defaults(main=module.main)
    return parser


def load(command: str) -> ModuleType:
    """Imports the module of a command."""
    return import_module(all_commands()[command].module)
