"""Folders of strangers are scored or refused in one line; nothing in them runs, and nothing waits."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.bases import STORIES
from tests.hostile import PLACES, replace_by

TOOL = Path(__file__).parents[2] / "tools" / "evaluate.py"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(STORIES, tmp_path / "model")
    (tmp_path / "text.jsonl").write_text('{"text": "Once upon a time there was a cat."}\n')
    return tmp_path / "model"


@pytest.fixture
def refused(folder, monkeypatch, capsys):
    """The line in which the tool refuses the folder, or None if it scores it."""

    def run():
        arguments = ["--model", folder, "--data", folder.parent / "text.jsonl", "--context", 16]
        monkeypatch.setattr(sys, "argv", list(map(str, [TOOL, *arguments])))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TOOL), run_name="__main__")
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error: ", "Traceback"))]
        assert ended.value.code in (0, 1)
        assert len(lines) == ended.value.code
        assert all(line.startswith(f"error: {folder}") and len(line) < 800 for line in lines)
        return lines[0] if lines else None

    return run


def change(file, **entries):
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


CONFIGS = {
    "a package that is missing": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "bits",
    ),
    "a quantization that is no object": ({"quantization_config": [1]}, "cannot be loaded"),
    "a model type that is a list": ({"model_type": []}, "cannot be loaded"),
    "an unknown model type": ({"model_type": "chatglm"}, "chatglm"),
    "no type of weights": ({"dtype": "x"}, "cannot be loaded"),
    "no heads": ({"num_attention_heads": 0}, "cannot be loaded"),
    "code": (
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.E", "AutoModelForCausalLM": "evil.E"}},
        "needs the code",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_config_that_cannot_be_loaded_is_refused(folder, refused, fault):
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    entries, expected = CONFIGS[fault]
    change(folder / "config.json", **entries)
    assert expected in refused()
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("kind", PLACES)
def test_any_other_thing_in_place_of_the_config_is_refused(folder, refused, kind):
    replace_by(kind, folder / "config.json")
    assert "config.json" in refused()


def test_an_old_tokenizer_class_is_not_needed_for_texts(folder, refused):
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="ChatGLMTokenizer",
        auto_map={"AutoTokenizer": ["evil.E", None]},
    )
    assert refused() is None


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder, refused):
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"].append({**described["added_tokens"][0], "id": 600, "content": "cat", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert "gives the id" in refused()
