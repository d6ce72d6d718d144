"""`scale-cpt COMMAND`: its parser, and the programs of tools/ as its commands.

A program is a module with a docstring, which is its help, `add_options(parser)` and `main(arguments)`. Only the one
that is asked for is imported: the list of commands is there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from pipeline import __version__
from pipeline.errors import CONFIG_ERROR
from pipeline.files import shipped, use_utf8, with_pages_found

PROGRAM = "scale-cpt"
PROGRAMS = {
    # a run
    "config": "run_config",
    "clean": "clean_corpora",
    "tokenize": "preprocess_data",
    "sample": "sample_base",
    "upscale": "upscale",
    "train": "train",
    "gate": "fit_gate",
    "convert": "convert_checkpoint",
    "combine": "combine",
    "evaluate": "evaluate",
    # before it
    "new": "new_folder",
    "estimate": "estimate",
    "tokenizer": "train_tokenizer",
    "vocabulary": "extend_vocabulary",
    # looking at it
    "status": "status",
    "inspect": "inspect_checkpoint",
    "inspect-data": "inspect_data",
    # for scripts and shells
    "may-retry": "may_retry",
    "describe-config": "describe_config",
    "completion": "completion",
}
"""The program of each command: a file of tools/, or the module pipeline.train."""
MOVED = {"study": "python -m studies run", "report": "python -m studies report"}
"""Former commands, and the commands of a checkout that replace them."""


def main() -> None:
    """Runs the command that `sys.argv` names, with the arguments after it."""
    use_utf8()
    words = sys.argv[1:] or ["--help"]
    if words[0] in MOVED:
        instead = " ".join([MOVED[words[0]], *words[1:]])
        print(
            f"error: scale-cpt {words[0]} is now a command of the project's checkout: {instead}",
            file=sys.stderr,
        )
        sys.exit(CONFIG_ERROR)
    arguments = build_parser(words[:1]).parse_args(words)
    from pipeline import command_line  # after the parser: --help waits for nothing

    sys.argv = [f"{PROGRAM} {words[0]}", *words[1:]]
    command_line.run_parsed(arguments.main, arguments)


def build_parser(commands: Collection[str] = PROGRAMS.keys()) -> argparse.ArgumentParser:
    """The parser of `scale-cpt`; only `commands` get their options, and are imported."""
    parser = argparse.ArgumentParser(PROGRAM, epilog=f"{PROGRAM} COMMAND --help: its options")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, program in PROGRAMS.items():
        text = with_pages_found(_path_of(program).read_text(encoding="utf-8").split('"""', 2)[1])
        own = subparsers.add_parser(
            command,
            help=text.splitlines()[0].replace("%", "%%"),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command in commands:
            module = load(program)
            module.add_options(own)
            own.set_defaults(main=module.main)
    return parser


def load(program: str) -> ModuleType:
    spec = spec_from_file_location(f"scale_cpt_{program}", _path_of(program))
    assert spec is not None and spec.loader is not None  # a Python file has both
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _path_of(program: str) -> Path:
    if program == "train":
        return Path(__file__).with_name("train.py")
    return shipped() / "tools" / f"{program}.py"
