"""The table of types that can be a base: its rows, and their number in docs/architectures.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from pipeline.errors import CONFIG_ERROR
from pipeline.extensions.hosted import command
from pipeline.extensions.hosted.command import TABLE_BEGINS, TABLE_ENDS, TABLE_HEAD, stored_rows
from pipeline.extensions.hosted.survey import all_types, survey
from tests.programs import scale_cpt

PROJECT = Path(__file__).parents[3]
LLAMA = (
    "| `llama` | native | LlamaForCausalLM | LlamaAttention, LlamaMLP | positions that restart |"
)


def test_the_table_has_a_row_for_every_type():
    assert list(stored_rows()) == all_types()


def test_the_page_says_how_many_types_there_are_of_each_use():
    of_use = dict.fromkeys(("native", "hosted", "refused"), 0)
    for row in stored_rows().values():
        of_use[re.split(r"(?<!\\) \|", row)[1].strip()] += 1
    native, hosted, refused = of_use.values()
    said = (
        f"Of {native + hosted + refused} types of transformers {native} are native, {hosted} hosted "
        f"and {refused} refused"
    )
    page = (PROJECT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert said in " ".join(page.split())


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        *[
            pytest.param(model_type, marks=pytest.mark.full)
            for model_type in ("gemma4", "paligemma", "falcon", "gpt_oss", "qwen2_vl", "xlnet")
        ],
    ],
)
def test_a_row_of_the_table_is_what_is_found(model_type):
    (found,) = survey([model_type])
    assert found.row() == stored_rows()[model_type]


def test_the_command_prints_the_stored_table_at_once():
    """Without torch, of which the import alone takes seconds."""
    program = "from pipeline.cli import main; import sys; sys.argv[1:] = ['bases']\n"
    program += "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [*TABLE_HEAD.splitlines(), *stored_rows().values()]
    assert done.stderr.splitlines()[-1] == "False"


def test_the_command_looks_types_up_and_tries_folders(tmp_path, monkeypatch):
    config = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 97}
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    stored = {"llama": "| `llama` | as stored |"}
    monkeypatch.setattr(command, "stored_rows", lambda: stored)
    done = scale_cpt("bases", "llama", tmp_path, "nosuch")
    head, rows = done.stdout[: len(TABLE_HEAD)], done.stdout[len(TABLE_HEAD) :].strip()
    assert head == TABLE_HEAD
    assert rows.splitlines() == [
        stored["llama"],
        LLAMA,
        "| `nosuch` | refused |  | model_type 'nosuch': transformers has no such type of its own, "
        "and code of a model's folder is not run; use a base of another type |  |",
    ]
    assert scale_cpt("bases", "--try", "llama").stdout.splitlines()[-1] == LLAMA
    refused = scale_cpt("bases", "--try")
    assert refused.returncode == CONFIG_ERROR and "--try: name the types" in refused.stderr


def test_the_command_replaces_the_table_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{TABLE_BEGINS}\nold\n{TABLE_ENDS}\nafter\n")
    assert scale_cpt("bases", "llama", "--write", page).returncode == 0
    table = f"{TABLE_HEAD}\n{LLAMA}"
    assert page.read_text() == f"before\n{TABLE_BEGINS}\n{table}\n{TABLE_ENDS}\nafter\n"


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    done = scale_cpt("bases", "llama", "--write", page)
    assert done.returncode == CONFIG_ERROR
    assert f"{page}: has no lines {TABLE_BEGINS}" in done.stderr


def test_a_folder_whose_class_is_not_of_transformers_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(orjson.dumps({"model_type": "own", "auto_map": {}}))
    (found,) = survey([str(tmp_path)])
    assert found.use == "refused"
    assert "code of a model's folder is not run" in found.reason
