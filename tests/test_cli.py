"""`scale-cpt`: its commands, which the scripts of tools/ run as files."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline import commands
from pipeline.commands import all_commands
from pipeline.config.run import load_config, parse_config
from pipeline.errors import CONFIG_ERROR
from studies.__main__ import build_parser as studies_parser
from tests.bases import STORIES
from tests.programs import scale_cpt
from tests.training.runs import write_config

PROJECT = Path(__file__).parents[1]
COMMANDS = all_commands()
FILE_NAMES = {command: command.replace("-", "_") + ".py" for command in COMMANDS}
FILE_NAMES["try"] = "try_run.py"  # try is a word of Python


def run_script(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a file of tools/ with this checkout's package."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
        capture_output=True,
        text=True,
    )


def test_the_list_of_commands_imports_none_of_them():
    code = (
        "import sys; from pipeline.commands import build_parser; build_parser([]).format_help();"
        "print([name for name in sys.modules if name.startswith('pipeline.commands.') or name.endswith('.command')],"
        " 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[] False\n"


def test_the_help_of_the_stages_loads_no_torch():
    stages = [*COMMANDS][: [*COMMANDS].index("inspect-data")]
    code = (
        f"import sys; from pipeline.commands import build_parser; build_parser({stages});"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_every_module_of_commands_and_every_script_is_a_command():
    modules = {command.module for command in COMMANDS.values()}
    for path in PROJECT.glob("pipeline/commands/*.py"):
        assert path.name == "__init__.py" or f"pipeline.commands.{path.stem}" in modules
    assert {path.name for path in PROJECT.glob("tools/*.py")} == set(FILE_NAMES.values())


def test_every_command_has_a_help_of_its_own(capsys):
    parser = commands.build_parser()
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            parser.parse_args([command, "--help"])
        printed = capsys.readouterr().out
        assert printed.startswith(f"usage: scale-cpt {command} ")
        assert COMMANDS[command].summary in printed
        assert f"scale-cpt {command}" in commands.load(command).__doc__, "an example"


@pytest.mark.parametrize("command", FILE_NAMES)
def test_a_command_runs_as_a_file_too(command):
    """Also tokenize.py and inspect.py, which would hide Python's own modules of these names."""
    done = run_script(PROJECT / "tools" / FILE_NAMES[command], "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: scale-cpt {command} ")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P is of 3.11")
def test_a_script_keeps_the_search_path_that_python_left_as_it_is():
    done = run_script("-P", PROJECT / "tools" / "status.py", "--help")
    assert done.returncode == 0, done.stderr


def test_a_script_starts_workers(tmp_path):
    """Spawned processes run the script's file again, and must find Python's own tokenize."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "Once upon a time"}\n' * 50)
    arguments = ["--input", text, "--tokenizer", STORIES, "--output", tmp_path / "corpus"]
    done = run_script(PROJECT / "tools" / "tokenize.py", *arguments, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "50 documents" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("tokenize", "--set", "seed=7"),
            "error: --set changes a run; name its YAML file or its folder\n",
        ),
        (
            ("evalute",),
            "error: scale-cpt: argument COMMAND: invalid choice: 'evalute' (did you mean "
            "evaluate?); choose from ",
        ),
        (
            ("convert", "run.yaml", "--formt", "merged"),
            "error: scale-cpt convert: unknown argument: --formt (did you mean --format?); "
            "see scale-cpt convert --help\n",
        ),
        (
            ("convert", "--format", "merge"),
            "error: scale-cpt convert: argument --format: invalid choice: 'merge' (did you mean "
            "merged?); choose from ",
        ),
        (
            ("convert", "--format", "plain"),
            "error: scale-cpt convert: argument --format: invalid choice: 'plain'; choose from ",
        ),
        (
            ("config", "ini"),
            "error: scale-cpt config: argument command: invalid choice: 'ini' (did you mean init?)",
        ),
        (
            ("study", "a.yaml"),
            "error: scale-cpt study is now a command of the project's checkout: "
            "python -m studies run a.yaml\n",
        ),
        (
            ("train", "--gpus", "2", "configs/demo.yaml"),
            "error: only --dry-run takes these options",
        ),
        (
            ("evaluate", "configs/demo.yaml", "--tasks", "arc_easy"),
            "error: a run is scored on its own held-out texts, and on --chats; to score models on ",
        ),
        (("evaluate", "--model", "x"), "error: name a run, or --model with one of --data, "),
    ],
)
def test_a_command_that_cannot_be_is_refused(words, said):
    done = scale_cpt(*words)
    assert done.returncode == CONFIG_ERROR and done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """`parser`, its commands, and theirs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers_of(command)


def list_options() -> list[tuple[argparse.ArgumentParser, argparse.Action]]:
    """The options of all commands, and of the studies, that take any number of values."""
    found: list[tuple[argparse.ArgumentParser, argparse.Action]] = []
    for program in (commands.build_parser(), studies_parser()):
        for parser in parsers_of(program):
            for action in parser._actions:
                if action.option_strings and action.nargs in ("+", "*"):
                    found.append((parser, action))
    return found


LIST_OPTIONS = list_options()


@pytest.mark.parametrize(
    ("parser", "option"),
    LIST_OPTIONS,
    ids=[f"{parser.prog} {option.option_strings[-1]}" for parser, option in LIST_OPTIONS],
)
def test_a_list_option_that_is_given_twice_keeps_all_values(parser, option, monkeypatch):
    # The option alone, so that nothing else is required.
    monkeypatch.setattr(parser, "_actions", [option])
    monkeypatch.setattr(parser, "_mutually_exclusive_groups", [])
    name = option.option_strings[-1]
    first, second, third = [*(option.choices or ()), "1", "2", "3"][:3]

    def values(*words: str) -> list[object]:
        return getattr(parser.parse_args([*words]), option.dest)

    at_once = values(name, first, second, third)
    assert len(at_once) == 3, "the default is replaced"
    assert values(name, first, name, second, name, third) == at_once
    assert values(name, first, second, f"{name}={third}") == at_once
    assert values(name, third) == at_once[2:], "nothing is left of an earlier command line"


def test_the_list_options_that_users_meet_are_among_them():
    names = {f"{parser.prog} {option.option_strings[-1]}" for parser, option in LIST_OPTIONS}
    for option in ("--new", "--old", "--new-chats", "--old-chats"):
        assert f"scale-cpt config init {option}" in names
    for command in ("tokenize --input", "evaluate --data", "vocabulary --corpus"):
        assert f"scale-cpt {command}" in names, names


def test_the_effective_configuration_is_shown(tmp_path):
    write_config(tmp_path, tmp_path, name="base.yaml")
    path = tmp_path / "run.yaml"
    path.write_text("extends: base.yaml\nseed: 5\nstability: {loss_increase: null}\n")
    shown = scale_cpt("config", "show", path, "--set", "schedule.steps=20").stdout
    assert parse_config(yaml.safe_load(shown), source="shown") == load_config(
        path, ["schedule.steps=20"]
    )
    # The table of groups follows as comments; so does the reason where it cannot be made.
    assert re.search(r"^# expansion_to_base +\d", shown, re.MULTILINE)
    elsewhere = scale_cpt("config", "show", path, "--set", "base=models/none").stdout
    assert "# groups of parameters: unknown, because models/none is not on" in elsewhere
    unmatched = "schedule.weight_decay_factors={router: 0}"
    assert scale_cpt("config", "show", path, "--set", unmatched).returncode == CONFIG_ERROR
    refused = scale_cpt("config", "show", path, "--set", "schedule.step=20")
    assert refused.returncode == CONFIG_ERROR and "did you mean steps?" in refused.stderr


def test_what_would_be_lost_or_ignored_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = scale_cpt("new", ".")
    assert made.returncode == 1 and "is the working directory" in made.stderr
    (tmp_path / "tokenizer.json").write_text("{}")
    text = ["--input", STORIES / "README.md", "--vocab-size", "300"]
    trained = scale_cpt("tokenizer", *text, "--output", "tokenizer.json")
    assert trained.returncode == 1 and "tokenizer.json: exists; remove it" in trained.stderr
    below = scale_cpt("tokenizer", *text, "--output", "tokenizer.json/x.json")
    assert below.returncode == 1 and "which cannot be made" in below.stderr
    run = write_config(tmp_path / "run", tmp_path)
    sampled = scale_cpt("sample", run, "--base", STORIES, "--output", "own")
    assert sampled.returncode == CONFIG_ERROR
    assert "error: --base: is for sampling without a run" in sampled.stderr


def test_completion_knows_commands_and_options():
    pytest.importorskip("shtab")
    for shell, syntax in (("bash", ["bash", "-n"]), ("zsh", None)):
        script = scale_cpt("completion", shell).stdout
        for word in ("tokenize", "inspect-data", "--max-bad-fraction", "--ranks"):
            assert word in script, (shell, word)
        if syntax:
            subprocess.run(syntax, input=script, text=True, check=True)


def test_completion_knows_the_files_of_a_folder(tmp_path):
    pytest.importorskip("shtab")
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "model").mkdir()
    script = scale_cpt("completion", "bash").stdout
    for words, expected in (
        ("scale-cpt train mi", "mine.yaml"),
        ("scale-cpt config init --base mod", "model"),
        ("scale-cpt config init --new mi", "mine.yaml"),
    ):
        last = len(words.split()) - 1
        asked = f"COMP_WORDS=({words}); COMP_CWORD={last}; _shtab_scale_cpt; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash"], input=f"{script}\n{asked}", text=True, capture_output=True, cwd=tmp_path
        )
        assert done.stdout.split() == [expected], words
