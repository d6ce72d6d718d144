"""The front `scale-cpt`: its commands are the programs of tools/, and itself it loads none of them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from pipeline import __version__, cli
from pipeline.config.run import parse_config
from pipeline.errors import CONFIG_ERROR
from pipeline.run_folder.changes import read_run
from pipeline.shipped import shipped
from tests.training.runs import write_config

NOT_COMMANDS = {"gpu_check"}  # reads the repository's benchmarks


def called(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    monkeypatch.setattr(sys, "argv", ["scale-cpt", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
        raise SystemExit(0)
    return end.value.code or 0


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_front_itself_loads_nothing_but_python(option):
    code = (
        "import sys; before = set(sys.modules); sys.argv = ['scale-cpt', sys.argv[1]]\n"
        "from pipeline.cli import main; main()\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print('LOADED', sorted(names - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("LOADED ['pipeline']\n"), done.stdout
    assert (__version__ if option == "--version" else "looking at it:") in done.stdout


def test_every_tool_is_a_command_and_shows_its_own_help(monkeypatch, capsys):
    assert {path.stem for path in (shipped() / "tools").glob("*.py")} - NOT_COMMANDS == {*cli.PROGRAMS.values()} - {
        "train"
    }
    for command in cli.PROGRAMS:
        if command != "train":  # which ends the process
            assert called(monkeypatch, command, "--help") == 0
            assert capsys.readouterr().out.startswith(f"usage: scale-cpt {command} ")


def test_a_misspelt_command_gets_the_nearest_one(monkeypatch, capsys):
    assert called(monkeypatch, "evalute") == CONFIG_ERROR
    assert capsys.readouterr().err.startswith("error: evalute: no such command (did you mean evaluate?)")


def test_inspect_takes_checkpoints_and_token_corpora(tokens, tmp_path, monkeypatch, capsys):
    for folder in (tokens / "korean", tokens):
        assert cli._for_folder("inspect", [str(folder)]) == "inspect_data"
    (tmp_path / "run" / "tokens" / "korean").mkdir(parents=True)
    (tmp_path / "run" / "tokens" / "korean" / "000.idx").touch()
    for arguments in ([str(tmp_path / "run")], ["--json", str(tmp_path / "none")], ["--help"]):
        assert cli._for_folder("inspect", arguments) == "inspect_checkpoint"
    (tmp_path / "own" / "korean").mkdir(parents=True)  # data.folder may be the run's own
    (tmp_path / "own" / "korean" / "000.idx").touch()
    (tmp_path / "own" / "checkpoints").mkdir()
    assert cli._for_folder("inspect", [str(tmp_path / "own")]) == "inspect_checkpoint"
    assert called(monkeypatch, "inspect", tokens / "korean") == 0
    assert "tokens " in capsys.readouterr().out


def test_the_effective_configuration_is_shown_with_its_sources(tmp_path, monkeypatch, capsys):
    """tools/run_config.py"""
    write_config(tmp_path, tmp_path, name="base.yaml")
    path = tmp_path / "run.yaml"
    path.write_text("extends: base.yaml\nseed: 5\nstability: {loss_increase: null}\n")
    assert called(monkeypatch, "config", "show", path, "--set", "schedule.steps=20") == 0
    shown = capsys.readouterr().out
    assert parse_config(yaml.safe_load(shown), source="shown") == read_run(path, ["schedule.steps=20"])
    for line in (rf"seed: 5 +# {path}", r"  steps: 20 +# --set", rf"  micro_batch_size: 2 +# {tmp_path}/base.yaml"):
        assert re.search(f"(?m)^{line}$", shown), line
    assert re.search(r"(?m)^  window: 128 +# default$", shown)
    assert called(monkeypatch, "config", "show", path, "--set", "schedule.step=20") == CONFIG_ERROR
    assert "did you mean steps?" in capsys.readouterr().err


def test_completion_knows_commands_and_options(monkeypatch, capsys):
    """tools/completion.py"""
    pytest.importorskip("shtab")
    for shell, syntax in (("bash", ["bash", "-n"]), ("zsh", None)):
        assert called(monkeypatch, "completion", shell) == 0
        script = capsys.readouterr().out
        for word in ("tokenize", "inspect-data", "--max-bad-fraction", "--ranks"):
            assert word in script, (shell, word)
        if syntax:
            subprocess.run(syntax, input=script, text=True, check=True)
