"""`scale-cpt COMMAND`: one front for the programs of tools/, which it runs as they are.

It imports nothing but the program that is asked for: the help of the front is there at once.
"""

from __future__ import annotations

import sys
import textwrap
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from pipeline import __version__
from pipeline.errors import CONFIG_ERROR, nearest
from pipeline.shipped import shipped

PROGRAM = "scale-cpt"
COMMANDS = {
    "a run": {
        "config": "run_config",
        "tokenize": "preprocess_data",
        "sample": "sample_base",
        "upscale": "upscale",
        "train": "train",
        "gate": "fit_gate",
        "convert": "convert_checkpoint",
        "evaluate": "evaluate",
    },
    "before it": {
        "new": "new_folder",
        "estimate": "estimate",
        "tokenizer": "train_tokenizer",
        "vocabulary": "extend_vocabulary",
    },
    "looking at it": {
        "status": "status",
        "inspect": "inspect_checkpoint",
        "inspect-data": "inspect_data",
        "report": "report",
        "serve-check": "serve_check",
    },
    "many runs": {
        "study": "run_study",
        "frontier": "show_frontier",
        "biographies": "make_biographies",
        "show-biographies": "show_biographies",
    },
    "scripts and shells": {
        "launch": "launch_here",
        "may-retry": "may_retry",
        "describe-config": "describe_config",
        "completion": "completion",
    },
}
"""The program of each command, by subject: a file of tools/, or the module pipeline.train."""
PROGRAMS = {command: program for commands in COMMANDS.values() for command, program in commands.items()}


def main() -> None:
    """Runs the command that `sys.argv` names, with the arguments after it."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
    elif arguments[0] == "--version":
        print(f"{PROGRAM} {__version__}")
    elif arguments[0] not in PROGRAMS:
        hint = nearest(arguments[0], PROGRAMS)
        print(f"error: {arguments[0]}: no such command{hint}; {PROGRAM} --help lists them", file=sys.stderr)
        sys.exit(CONFIG_ERROR)
    else:
        command = arguments[0]
        program = _for_folder(command, arguments[1:])
        sys.argv = [f"{PROGRAM} {command}", *arguments[1:]]
        if program == "train":
            from pipeline import train

            train.run()
        from pipeline import command_line

        command_line.run(load(program).main)


def load(program: str) -> ModuleType:
    """The module of a program."""
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


def usage() -> str:
    """The help of the front: each command with the first line of its program's own help."""
    lines = [f"usage: {PROGRAM} COMMAND …          {PROGRAM} COMMAND --help: its options", ""]
    for subject, commands in COMMANDS.items():
        lines.append(f"{subject}:")
        lines += [f"  {command:17} {_summary(program)}" for command, program in commands.items()]
    return "\n".join(
        [*lines, "", f"{PROGRAM} --version prints the version. Every command but train is a program of tools/ too."]
    )


def _summary(program: str) -> str:
    first_line = _path_of(program).read_text(encoding="utf-8").split('"""', 2)[1].splitlines()[0]
    return textwrap.shorten(first_line, 100, placeholder=" …")


def _for_folder(command: str, arguments: list[str]) -> str:
    """The program of a command; `inspect` also takes token corpora, which a run's folder may hold too."""
    folders = [Path(argument) for argument in arguments if not argument.startswith("-")]
    folders = [folder for folder in folders if not (folder / "checkpoints").is_dir()]
    if command == "inspect" and any(
        next(folder.glob(name), None) for folder in folders for name in ("*.idx", "*/*.idx")
    ):
        command = "inspect-data"
    return PROGRAMS[command]
