"""The commands of scale-cpt: a module each, of the command's name with `_` for `-` (`MODULES`).

A command's module has a docstring, which is its help, `add_options(parser)`, and
`main(arguments)`, which returns the exit code, or None for 0. `pipeline.cli` calls them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from pipeline import __version__
from pipeline.errors import CONFIG_ERROR, did_you_mean
from pipeline.installation import locate_docs

PROGRAM = "scale-cpt"

# In the order of `scale-cpt --help`. The summaries are here, and not only in the docstrings of the
# modules, so that the list waits for no import.
COMMANDS = {
    # The stages of a run.
    "config": "Shows every setting of a run, or writes a first configuration.",
    "clean": "Cleans the corpora of a run that have a section `clean`, before tokenization.",
    "tokenize": "Makes token corpora of documents: Megatron's .bin/.idx, with a manifest.",
    "sample": "Makes token corpora of text that the base model writes itself.",
    "upscale": "Computes the initial expansion of a base model, once, for any parallel layout.",
    "train": "Trains a run, from its newest checkpoint on.",
    "gate": "Fits the gate of a finished run, which decides per token whether the text is new.",
    "convert": "Converts a checkpoint to a Hugging Face folder, and verifies it.",
    "combine": "Puts expansions of one base into one folder.",
    "evaluate": "Scores models: perplexity, benchmarks, chats, or the final table of a run.",
    # Before a run.
    "new": "Makes a folder to work in: configurations, batch scripts, the demo's model and texts.",
    "bases": "Lists which types of models can be a base: native, hosted or refused, and why.",
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


MODULES = {command: command.replace("-", "_") for command in COMMANDS}
MODULES["try"] = "try_run"  # try is a word of Python
"""The module of each command."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line: what is wrong, and where help is."""

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


def build_parser(with_options: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of `scale-cpt`.

    Args:
        with_options: The commands that are imported and get their options. The others are only
            listed.
    """
    parser = _Parser(PROGRAM, epilog=f"{PROGRAM} COMMAND --help: its options")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    wanted = set(with_options)
    for command, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            command,
            help=summary.replace("%", "%%"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command in wanted:
            module = load(command)
            subparser.description = locate_docs(module.__doc__ or "")
            module.add_options(subparser)
            subparser.set_defaults(main=module.main)
    return parser


def load(command: str) -> ModuleType:
    """Imports the module of a command."""
    return import_module(f"pipeline.commands.{MODULES[command]}")
