"""The way of a new user on hosted bases: from `scale-cpt config init` to a verified folder."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
import zstandard
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.convert import HF_FOLDER
from pipeline.errors import ConversionError
from pipeline.files.json_files import read_object
from tests.distributed import run_ranks
from tests.extensions.hosted.bases import PICTURE_TOKEN, save_hosted
from tests.programs import scale_cpt
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.runs import train

pytestmark = pytest.mark.full

LOADERS: dict[str, Any] = {
    "gemma3": AutoModelForImageTextToText,
    "qwen3_next": AutoModelForCausalLM,
    "gpt_oss": AutoModelForCausalLM,
}
# What a user in a hurry changes; everything else is what `config init` proposes.
HURRIED = {
    "data.sequence_length": 32,
    "data.corpora.self_generated.sample.tokens": 500,
    "data.corpora.self_generated.sample.max_tokens": 32,
    "schedule.steps": 10,
    "schedule.micro_batch_size": 4,
    "validation.every_steps": 10,
    "validation.max_sequences": 2,
    "checkpoints.every_steps": 10,
    "gate.tokens": 100,
    "gate.max_open_fraction": 0.02,  # of which less text says enough
    # Experts of 20 channels: products in bf16 take rows of multiples of 16 bytes.
    "deepspeed": "ds_configs/zero1_fp32.json",
}
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def _beginning(path: Path, texts: Path, count: int) -> Path:
    """Writes the first `count` records of `texts` to `path`."""
    with zstandard.open(texts, "rt", encoding="utf-8") as lines:
        path.write_text("".join(islice(lines, count)), encoding="utf-8")
    return path


def _first_configuration() -> RunConfig:
    """The run that `config init` proposes for the folder `base`, made a short one."""
    new = _beginning(Path("new.jsonl"), REVIEWS_HELDOUT, 20)
    old = _beginning(Path("old.jsonl"), STORIES_HELDOUT, 40)
    texts = ("--new", new, "--old", old)
    done = scale_cpt("config", "init", "--base", "base", *texts, "--gpus", 1)
    assert done.returncode == 0, done.stderr
    assert "none found" in done.stdout
    path = Path("base.yaml")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, value in HURRIED.items():
        *sections, last = name.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_config(path)


def _loaded(auto_class: Any, folder: Path) -> Any:
    options = {"dtype": torch.float32, "trust_remote_code": True}
    return auto_class.from_pretrained(folder, **options).eval()


def _close(model: Any) -> None:
    """Closes the gate for every token."""
    model.token_gate.threshold = float("inf")
    model.token_gate.is_open_id = None


@pytest.mark.parametrize("kind", LOADERS)
@torch.no_grad()
def test_from_a_first_configuration_to_a_verified_folder_that_generates(
    kind, tmp_path, monkeypatch
):
    save_hosted(kind, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    config = _first_configuration()
    method = config.method
    assert config.gate is not None
    assert method.open_rows is not None and method.open_gains and method.low_rank is not None
    for stage in ("tokenize", "sample", "upscale"):
        done = scale_cpt(stage, "base.yaml")
        assert done.returncode == 0, f"{stage}: {done.stderr}"
    assert run_ranks(train, 1, tmp_path / "base.yaml") == [0]
    for stage in ("gate", "convert"):
        done = scale_cpt(stage, "base.yaml")
        assert done.returncode == 0, f"{stage}: {done.stderr}"
    export = config.folder / HF_FOLDER
    report = read_object(export / "verification.json", ConversionError)
    assert report["max_abs"] < 1e-4

    model = _loaded(LOADERS[kind], export)
    assert max(abs(part).max() for part in model.own_input.parameters()) > 0
    tokenizer = AutoTokenizer.from_pretrained(export)
    prompt = tokenizer("이 영화는", return_tensors="pt")["input_ids"]
    assert model.generate(prompt, **GREEDY).shape[1] == prompt.shape[1] + 4

    # Closed text is the base's own, through training, export and generation with a cache.
    base = _loaded(LOADERS[kind], tmp_path / "base")
    weights = model.base.state_dict()
    for name, tensor in base.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    # The same memory: a product with a vector rounds by where its operands lie.
    base.load_state_dict(weights, assign=True)
    _close(model)
    text = tokenizer("Once upon a time there was a little girl", return_tensors="pt")["input_ids"]
    inputs: dict[str, Any] = {"input_ids": text}
    if kind == "gemma3":
        picture = torch.full((1, 4), PICTURE_TOKEN)
        with_picture = torch.cat([picture, text], dim=1)
        types = (with_picture == PICTURE_TOKEN).long()
        pixels = torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28)
        inputs = {"input_ids": with_picture, "token_type_ids": types, "pixel_values": pixels}
    assert torch.equal(model(**inputs).logits, base(**inputs).logits)
    assert torch.equal(model.generate(text, **GREEDY), base.generate(text, **GREEDY))
