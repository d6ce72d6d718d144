"""The front `scale-cpt`: its commands are the programs of tools/, and itself it loads none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from pipeline import cli
from pipeline.config.run import load_config, parse_config
from pipeline.errors import CONFIG_ERROR
from pipeline.files import shipped
from tests.programs import scale_cpt
from tests.training.runs import write_config


def test_the_help_of_the_stages_loads_no_torch():
    commands = [*cli.PROGRAMS][: [*cli.PROGRAMS].index("inspect-data")]
    code = f"import sys; from pipeline.cli import build_parser; build_parser({commands}); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )


def test_every_tool_is_a_command_with_a_help_of_its_own(capsys):
    assert {path.stem for path in (shipped() / "tools").glob("*.py")} == {
        *cli.PROGRAMS.values()
    } - {"train"}
    parser = cli.build_parser()
    for command in cli.PROGRAMS:
        with pytest.raises(SystemExit):
            parser.parse_args([command, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: scale-cpt {command} ")


def test_a_program_runs_as_a_file_too():
    program = shipped() / "tools" / "status.py"
    done = subprocess.run(
        [sys.executable, str(program), "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"usage: {program.name} ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("tokenize", "--set", "seed=7"),
            "error: --set changes a run; name its YAML file or its folder\n",
        ),
        (("evalute",), "usage: scale-cpt"),
        (
            ("study", "a.yaml"),
            "error: scale-cpt study is now a command of the project's checkout: "
            "python -m studies run a.yaml\n",
        ),
        (
            ("train", "--gpus", "2", "configs/demo.yaml"),
            "error: only --dry-run takes these options",
        ),
    ],
)
def test_a_command_that_cannot_be_is_refused(words, said):
    done = scale_cpt(*words)
    assert done.returncode == CONFIG_ERROR and done.stderr.startswith(said)


def test_the_effective_configuration_is_shown(tmp_path):
    write_config(tmp_path, tmp_path, name="base.yaml")
    path = tmp_path / "run.yaml"
    path.write_text("extends: base.yaml\nseed: 5\nstability: {loss_increase: null}\n")
    shown = scale_cpt("config", "show", path, "--set", "schedule.steps=20").stdout
    assert parse_config(yaml.safe_load(shown), source="shown") == load_config(
        path, ["schedule.steps=20"]
    )
    refused = scale_cpt("config", "show", path, "--set", "schedule.step=20")
    assert refused.returncode == CONFIG_ERROR and "did you mean steps?" in refused.stderr


def test_completion_knows_commands_and_options():
    pytest.importorskip("shtab")
    for shell, syntax in (("bash", ["bash", "-n"]), ("zsh", None)):
        script = scale_cpt("completion", shell).stdout
        for word in ("tokenize", "inspect-data", "--max-bad-fraction", "--ranks"):
            assert word in script, (shell, word)
        if syntax:
            subprocess.run(syntax, input=script, text=True, check=True)
