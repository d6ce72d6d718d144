"""Folders of strangers are scored or refused in one line; nothing in them runs, and nothing waits."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.bases import STORIES
from tests.programs import scale_cpt


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(STORIES, tmp_path / "model")
    (tmp_path / "text.jsonl").write_text('{"text": "Once upon a time there was a cat."}\n')
    return tmp_path / "model"


def refusal(folder) -> str | None:
    """The line in which the tool refuses the folder, or None if it scores it."""
    done = scale_cpt("evaluate", "--model", folder, "--data", folder.parent / "text.jsonl", "--context", 16)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "Traceback"))]
    assert done.returncode in (0, 1) and len(lines) == done.returncode
    assert all(line.startswith(f"error: {folder}") and len(line) < 800 for line in lines)
    return lines[0] if lines else None


def change(file, **entries):
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


CONFIGS = {
    "bits": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "cannot be loaded": {"num_attention_heads": 0},
    "cannot be loaded by": {"model_type": []},
    "chatglm": {"model_type": "chatglm"},
    "needs the code": {"model_type": "evil", "auto_map": {"AutoConfig": "evil.E", "AutoModelForCausalLM": "evil.E"}},
}


@pytest.mark.parametrize("expected", CONFIGS)
def test_a_config_that_cannot_be_loaded_is_refused(folder, expected):
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    change(folder / "config.json", **CONFIGS[expected])
    assert expected in refusal(folder)
    assert not (folder / "ran").exists()


def test_tokenizers_that_do_not_fit(folder):
    code = {"auto_map": {"AutoTokenizer": ["evil.E", None]}}
    change(folder / "tokenizer_config.json", tokenizer_class="ChatGLMTokenizer", **code)
    assert refusal(folder) is None, "texts need no class of the tokenizer"
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"].append({**described["added_tokens"][0], "id": 600, "content": "cat", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert "gives the id" in refusal(folder)
