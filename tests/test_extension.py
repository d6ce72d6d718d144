"""What extensions give, and what is refused of those that other distributions bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ExtensionError
from pipeline.evaluation import evaluator
from pipeline.extension import (
    ENTRY_POINT,
    Extension,
    extensions,
    load_class,
    load_instance,
    load_object,
)
from pipeline.extensions import NAMES
from pipeline.model import bases
from pipeline.optimizers.optimizer import Optimizer
from tests.bases import STORIES

GREETING = '''
"""Greets.

    scale-cpt greet
"""
from pipeline.extension import Command, Extension


def add_options(parser):
    parser.add_argument("--loud", action="store_true", help="in capitals")


def main(arguments):
    print("HELLO" if arguments.loud else "hello")


class Greeting(Extension):
    name = "{name}"
    requires = {requires}

    def commands(self):
        return {{"{command}": Command("Greets.", module="greeting", after="train")}}


EXTENSION = Greeting()
'''


EVALUATOR = """
from pipeline.evaluation.evaluator import Evaluator


class Words(Evaluator):
    help = "words to count the letters of"
    title = "lengths of words"

    def add_options(self, group):
        group.add_argument("--twice", action="store_true", help="count them twice")

    def scores(self, arguments):
        letters = sum(len(word) for word in arguments.words)
        return {str(model): letters * (1 + arguments.twice) for model in arguments.model}

    def table(self, scores):
        return ", ".join(f"{count} letters" for count in scores.values())


WORDS = Words()
Greeting.evaluators = lambda self: {"words": "greeting:WORDS"}
"""


def distribution(
    folder: Path,
    *,
    name: str = "greeting",
    requires: tuple[str, ...] = (),
    command: str = "greet",
    value: str = "greeting:EXTENSION",
) -> Path:
    """A folder of packages that holds an installed distribution with one extension."""
    source = GREETING.format(name=name, requires=requires, command=command)
    (folder / "greeting.py").write_text(source)
    info = folder / "greeting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT}]\ngreeting = {value}\n")
    return folder


def scale_cpt(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`scale-cpt` where the packages of the folder `installed` can be imported too."""
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )


def test_the_projects_own_extensions_have_the_names_of_their_packages():
    own = [one for one in extensions() if type(one).__module__.startswith("pipeline.extensions.")]
    assert tuple(one.name for one in own) == NAMES
    packages = Path(__file__).parents[1] / "pipeline" / "extensions"
    assert {path.parent.name for path in packages.glob("*/__init__.py")} == set(NAMES)


def test_an_extension_that_gives_nothing_changes_nothing():
    nothing = Extension()
    assert not nothing.commands()
    assert not nothing.input_checks("dry run")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "transformers",
            "its kind of bases transformers is there already, as "
            "pipeline.extensions.hosted.kind:HOSTED; give it another name",
        ),
        (
            "jax",
            "its kind of bases: expected one of native, transformers, found jax; give it that name",
        ),
    ],
)
def test_a_kind_of_bases_that_cannot_be_chosen_is_refused(monkeypatch, code, message):
    class Bases(Extension):
        name = "greeting"

        def base_kinds(self):
            return {code: "greeting:BASES"}

    assert list(bases.offered_kinds()) == ["native", "transformers"]
    monkeypatch.setattr(bases, "extensions", lambda: (*extensions(), Bases()))
    with pytest.raises(ExtensionError) as fault:
        bases.offered_kinds.__wrapped__()
    assert str(fault.value) == f"extension greeting: {message}"


@pytest.mark.parametrize("name", ["data", "tasks"])
def test_an_evaluator_of_a_name_that_is_taken_is_refused(monkeypatch, name):
    class Scores(Extension):
        def evaluators(self):
            return {name: "greeting:SCORES"}

    Scores.name = "greeting"
    assert "tasks" in evaluator.evaluators()
    monkeypatch.setattr(evaluator, "extensions", lambda: (*extensions(), Scores()))
    with pytest.raises(ExtensionError) as fault:
        evaluator.evaluators.__wrapped__()
    assert str(fault.value) == (
        f"extension greeting: its evaluator {name} is there already; give it another name"
    )


def test_an_evaluator_of_another_distribution_scores_models(tmp_path):
    installed = distribution(tmp_path)
    with (installed / "greeting.py").open("a") as file:
        file.write(EVALUATOR)
    listed = scale_cpt(installed, "evaluate", "--help").stdout
    assert "--words WORDS [WORDS ...]" in listed and "\nlengths of words:\n  --twice " in listed
    asked = ("evaluate", "--model", str(STORIES), "--words", "a", "bcd")
    done = scale_cpt(installed, *asked, "--twice")
    assert (done.returncode, done.stdout) == (0, "8 letters\n"), done.stderr
    done = scale_cpt(installed, *asked, "--json")
    assert json.loads(done.stdout) == {str(STORIES): 4}
    done = scale_cpt(installed, *asked, "--data", "a.jsonl")
    assert "name a run, or --model with one of --data, --tasks, " in done.stderr


def test_the_core_names_no_decoder_of_an_extension():
    """It asks the kind of a base, and loads an extension only for a base of its kind."""
    program = (
        "import sys\n"
        "from pipeline.methods import build_model, scale\n"
        "from pipeline.model.bases import kind_named\n"
        "kind_named('native')\n"
        "loaded = [name for name in sys.modules if name.startswith('pipeline.extensions.hosted.')]\n"
        "print(loaded)\n"
        "kind_named('transformers')\n"
        "print('pipeline.extensions.hosted.decoder' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\nTrue\n", done.stderr


def test_a_command_of_two_words_belongs_to_the_command_of_the_first(tmp_path):
    installed = distribution(tmp_path, command="config greet")
    assert "greet" not in scale_cpt(installed, "--help").stdout
    listed = scale_cpt(installed, "config", "--help").stdout
    assert listed.index("\n    show ") < listed.index("\n    greet ")
    done = scale_cpt(installed, "config", "greet", "--loud")
    assert (done.returncode, done.stdout) == (0, "HELLO\n")


def test_a_command_of_another_distribution_stands_where_it_asks_and_runs(tmp_path):
    installed = distribution(tmp_path)
    listed = scale_cpt(installed, "--help").stdout
    assert listed.index("\n    train ") < listed.index("\n    greet ") < listed.index("\n    gate ")
    done = scale_cpt(installed, "greet", "--loud")
    assert (done.returncode, done.stdout) == (0, "HELLO\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "cleaning"},
            "error: extension cleaning: installed twice, by pipeline.extensions.cleaning and "
            "greeting; uninstall one of the two\n",
        ),
        (
            {"requires": ("politeness",)},
            "error: extension greeting: requires the extension politeness, which is not installed; "
            "install the distribution that has it\n",
        ),
        (
            {"command": "train"},
            "error: extension greeting: its command train is there already, as "
            "pipeline.commands.train; give it another name\n",
        ),
        (
            {"command": "config show"},
            "error: extension greeting: its command config show is there already, as "
            "pipeline.commands.config; give it another name\n",
        ),
        (
            {"command": "train greet"},
            "error: extension greeting: its command train greet: expected one word, or config and "
            "a word; give it another name\n",
        ),
        (
            {"value": "greeting:Greeting"},
            "error: extension greeting: expected greeting:Greeting to be an instance of "
            "pipeline.extension.Extension, found type\n",
        ),
        (
            {"value": "gretting:EXTENSION"},
            "error: extension greeting: gretting:EXTENSION cannot be imported (ModuleNotFoundError: No "
            "module named 'gretting'); repair or uninstall its distribution\n",
        ),
    ],
)
def test_an_extension_that_cannot_be_used_ends_in_one_line(tmp_path, changes, message):
    done = scale_cpt(distribution(tmp_path, **changes), "status", "runs/none")
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("place", ["pipeline.nowhere:THING", "pipeline.errors:NOTHING"])
def test_a_place_where_nothing_stands_is_named(place):
    with pytest.raises(ExtensionError, match=rf"{place}: an extension offers it.*cannot be loaded"):
        load_object(place)


def test_a_place_whose_module_raises_is_named(tmp_path, monkeypatch):
    (tmp_path / "raises_when_imported.py").write_text("THING = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExtensionError, match=r"cannot be loaded \(ZeroDivisionError: .*; repair"):
        load_object("raises_when_imported:THING")


def test_only_the_kind_that_a_point_takes_is_loaded():
    """A class and an instance of it are told apart at every point."""
    place = "pipeline.optimizers.adamw:"
    adamw = load_instance(f"{place}ADAMW", Optimizer)
    assert load_class(f"{place}AdamW", Optimizer) is type(adamw)
    expected = "pipeline.optimizers.optimizer.Optimizer"
    with pytest.raises(ExtensionError) as fault:
        load_instance(f"{place}AdamW", Optimizer)
    assert str(fault.value) == (
        f"{place}AdamW: an extension offers it, expected an instance of {expected}, found the class "
        "pipeline.optimizers.adamw.AdamW; correct that extension"
    )
    with pytest.raises(ExtensionError) as fault:
        load_class(f"{place}ADAMW", Optimizer)
    assert str(fault.value) == (
        f"{place}ADAMW: an extension offers it, expected a subclass of {expected}, found an object "
        "of type pipeline.optimizers.adamw.AdamW; correct that extension"
    )
