"""A base that is a GGUF file: its weights and ids, what is refused, and what is made once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import GGUF_CONFIG_MAPPING

from pipeline.config.run import load_config
from pipeline.errors import BaseModelError, MissingPackageError, OutputError, in_one_line
from pipeline.gguf.folder import BASES, RECORD
from pipeline.hub import model_folder
from pipeline.model.from_hf import open_base
from tests.gguf.files import TEMPLATE, TOKENS, random_gemma2, random_llama, write_gguf

F32, Q8_0, Q4_1 = (getattr(GGMLQuantizationType, name) for name in ("F32", "Q8_0", "Q4_1"))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory, in which runs/bases is made."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 43).unsqueeze(0)
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("kind", [F32, Q8_0, Q4_1])
def test_weights_are_those_that_the_file_holds(here, kind):
    original = random_llama()
    folder = model_folder(write_gguf(here / "mine.gguf", original, kind))
    assert folder == BASES / "mine"
    before = logits(original)
    for parameter in original.parameters():
        if parameter.ndim > 1:  # rows are quantized each for itself, in whatever order
            blocks = quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(dequantize(blocks, kind).copy())
    expected = logits(original)
    assert torch.equal(expected, before) == (kind == F32)
    found = logits(AutoModelForCausalLM.from_pretrained(folder))
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_half_precision_stays_what_it_is_and_norms_are_rounded_to_it(here):
    original = random_llama()
    with torch.no_grad():
        original.model.norm.weight.copy_(1 + 1e-4 * torch.rand(64))
    folder = model_folder(write_gguf(here / "mine.gguf", original, GGMLQuantizationType.F16))
    assert open_base(folder).dtype == torch.float16
    found = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, original.state_dict()[name].half())


@pytest.mark.parametrize(("layers", "expected"), [(2, 8), (46, 16)])
def test_the_attention_of_gemma_is_scaled_as_by_llama_cpp(here, layers, expected):
    """By the size of a head, but in the one that is as deep as 27B by the size divided by heads."""
    original = random_gemma2(layers)
    file = write_gguf(here / "mine.gguf", original, entries={"gemma2.attention.key_length": 8})
    found = AutoModelForCausalLM.from_pretrained(model_folder(file))
    assert found.config.query_pre_attn_scalar == expected
    for layer in original.model.layers:
        layer.self_attn.scaling = expected**-0.5
    torch.testing.assert_close(logits(found), logits(original))


def test_every_digit_is_a_token_and_spaces_before_it_stay_together(here):
    folder = model_folder(write_gguf(here / "mine.gguf", random_llama()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("on  12\n\n3", add_special_tokens=False).input_ids
    assert [TOKENS[number] for number in ids] == ["on", "ĠĠ", "1", "2", "ĊĊ", "3"]
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer.chat_template == TEMPLATE


def test_a_pattern_that_nobody_knows_is_refused(here):
    file = write_gguf(here / "mine.gguf", random_llama(), pattern="tomorrow")
    with pytest.raises(BaseModelError, match=r"tokenizer\.ggml\.pre.*found 'tomorrow'"):
        model_folder(file)
    assert not BASES.exists() or not any(BASES.iterdir())


def test_it_is_made_once_and_again_where_a_file_is_cut(here, monkeypatch):
    file = write_gguf(here / "mine.gguf", random_llama())
    folder = model_folder(file)
    made = (folder / RECORD).stat().st_mtime_ns
    os.utime(file, (1, 1))  # copied again: another date
    assert model_folder(file) == folder
    assert (folder / RECORD).stat().st_mtime_ns == made
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert model_folder(file) == folder
    assert weights.read_bytes() == whole


def test_another_file_of_the_same_name_is_not_taken_for_the_first(here):
    file = write_gguf(here / "mine.gguf", random_llama())
    weights = (model_folder(file) / "model.safetensors").read_bytes()
    write_gguf(file, random_llama(), Q8_0)
    with pytest.raises(BaseModelError, match="another file of this name"):
        model_folder(file)
    assert (BASES / "mine" / "model.safetensors").read_bytes() == weights


def test_a_folder_of_something_else_is_never_replaced(here):
    (BASES / "mine").mkdir(parents=True)
    (BASES / "mine" / "notes.txt").write_text("a user's work")
    with pytest.raises(OutputError, match="expected nothing here"):
        model_folder(write_gguf(here / "mine.gguf", random_llama()))
    assert [path.name for path in (BASES / "mine").iterdir()] == ["notes.txt"]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_magic(data: bytes) -> bytes:
    return b"GGML" + data[4:]


def of_unknown_type(data: bytes) -> bytes:
    # A tensor's type stands behind its name and its two sizes.
    name = b"token_embd.weight"
    place = data.index(name) + len(name) + 4 + 16
    return data[:place] + (250).to_bytes(4, "little") + data[place + 4 :]


@pytest.mark.parametrize("damage", [cut, without_magic, of_unknown_type, lambda _: b""])
def test_a_damaged_file_is_one_line_and_leaves_nothing(here, damage):
    file = write_gguf(here / "mine.gguf", random_llama())
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BaseModelError) as refused:
        model_folder(file)
    line = in_one_line(refused.value)
    assert line.startswith(f"{file}: ")
    assert "\n" not in line
    assert not BASES.exists() or not any(BASES.iterdir())


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"split.count": 3}, "one of 3 parts"),
        ({"general.type": "adapter"}, "found 'adapter'"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled"),
    ],
)
def test_what_is_no_whole_model_is_refused(here, entries, expected):
    file = write_gguf(here / "mine.gguf", random_llama(), entries=entries)
    with pytest.raises(BaseModelError, match=expected):
        model_folder(file)
    assert not BASES.exists() or not any(BASES.iterdir())


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (
            {"blk.1.ffn_down.weight": None},
            r"missing keys: model\.layers\.1\.mlp\.down_proj\.weight",
        ),
        (
            {"blk.1.ffn_down.weight": np.ones((64, 64), np.float32)},
            r"mismatched keys: .*\.1\.mlp\.down_proj",
        ),
        (
            {"blk.1.attn_q.bias": np.ones(64, np.float32)},
            "78,592 values .* found 78,656: .* biases",
        ),
        ({"rope_freqs.weight": np.ones(8, np.float32)}, r"\(rope_freqs\.weight\)"),
    ],
)
def test_a_file_of_which_not_all_is_read_is_refused(here, tensors, expected):
    file = write_gguf(here / "mine.gguf", random_llama(), tensors=tensors)
    with pytest.raises(BaseModelError, match=expected):
        model_folder(file)
    assert not BASES.exists() or not any(BASES.iterdir())


def test_a_rotary_base_that_transformers_leaves_out_is_refused(here, monkeypatch):
    """As of StarCoder 2, which has no entry for it in the table of transformers."""
    original = random_llama()
    original.config.rope_parameters["rope_theta"] = 5e5
    file = write_gguf(here / "mine.gguf", original)
    assert open_base(model_folder(file)).spec.num_layers == 2
    monkeypatch.delitem(GGUF_CONFIG_MAPPING["llama"], "rope.freq_base")
    with pytest.raises(BaseModelError, match=r"freq_base: expected 10000, .* found 500000"):
        model_folder(file.rename(here / "other.gguf"))


def test_a_second_copy_of_a_tied_output_is_an_output_of_its_own(here):
    original = random_llama()
    rows = original.model.embed_tokens.weight.detach().numpy()
    folder = model_folder(write_gguf(here / "mine.gguf", original, tensors={"output.weight": rows}))
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert not found.config.tie_word_embeddings
    assert torch.equal(logits(found), logits(original))


def test_transformers_is_asked_for_values_where_it_could_compute_with_blocks(here, monkeypatch):
    asked = []
    read = AutoModelForCausalLM.from_pretrained

    def noting(*args, **options):
        asked.append(options["quantization_config"])
        return read(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noting)
    model_folder(write_gguf(here / "mine.gguf", random_llama(), Q8_0))
    assert [config.dequantize for config in asked] == [True]


def test_without_the_package_the_line_says_how_to_install_it(here, monkeypatch):
    file = write_gguf(here / "mine.gguf", random_llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingPackageError, match=r"scale-cpt\[gguf\]"):
        model_folder(file)


def test_a_missing_file_is_named(here):
    with pytest.raises(BaseModelError, match=r"absent\.gguf: no such file"):
        model_folder(Path("absent.gguf"))


def test_a_run_takes_it_as_its_base(here):
    write_gguf(here / "mine.gguf", random_llama())
    run = {
        "name": "mine",
        "folder": "runs/mine",
        "base": "mine.gguf",
        "method": {"name": "fft"},
        "data": {
            "folder": "runs/mine/tokens",
            "sequence_length": 32,
            "corpora": {"new": {"input": ["new.jsonl"]}},
        },
        "schedule": {
            "steps": 1,
            "global_batch_size": 1,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
        },
        "validation": {"every_steps": 1},
        "checkpoints": {"every_steps": 1},
        "deepspeed": "ds_configs/zero1_fp32.json",
    }
    (here / "run.yaml").write_text(json.dumps(run))
    config = load_config(here / "run.yaml")
    assert config.base == BASES / "mine"
    assert open_base(config.base).spec.num_layers == 2
