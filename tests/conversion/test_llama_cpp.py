"""A stock export in llama.cpp: its own converter reads the folder, and its log-probabilities are those of transformers.

Needs llama.cpp: `pipeline.conversion.llama_cpp` says how to install it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.conversion import llama_cpp
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.conversion.trained_model import open_trained
from pipeline.conversion.verify import probe_maker
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConversionError
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, generate_greedily, save_many, scale
from tests.distributed import run_ranks

# The mean difference of a token's log-probability: formats round weights; in Q8_0 llama.cpp rounds activations, too.
TOLERANCES = {"f32": 1e-3, "bf16": 2e-2, "f16": 5e-3, "q8_0": 1e-1, "q4_k_m": 0.5}

if missing := llama_cpp.why_missing():
    pytest.skip(f"llama.cpp is not tested: {missing}", allow_module_level=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """stories260K widened by 32 channels and 4 heads, in all 96 and 12, so that Q8_0's blocks of 32 fit its rows."""
    folder = tmp_path_factory.mktemp("served")
    widths = {"hidden_size": 32, "intermediate_size": 20, "num_attention_heads": 4}
    run_ranks(save_many, 1, [(STORIES, scale("adapt", norm="base", expansion=widths), folder / "run", 1, None, 4, 0.0)])
    asked = Conversion(checkpoint_in(folder / "run", 4), STORIES, folder / "hf", "stock", torch.bfloat16)
    assert convert(asked, probe_maker({"stories": ["data/en/stories.heldout.jsonl.zst"]}))
    assert open_trained(asked.checkpoint, STORIES).plan is not None
    return folder / "hf"


@pytest.mark.parametrize("format", llama_cpp.FORMATS)
def test_llama_cpp_computes_what_transformers_does(exported, tmp_path, format):
    gguf = tmp_path / "model.gguf"
    llama_cpp.write_gguf(exported, gguf, format)
    assert list(tmp_path.iterdir()) == [gguf]
    tokenizer = load_tokenizer(STORIES).reference
    text = "Once upon a time there was a little girl named Lily. She liked to play"
    tokens = torch.tensor([1, *tokenizer.encode([text]).ids.tolist()])
    model = load_hf_model(exported, torch.float32)
    with torch.no_grad():
        expected = model(tokens.unsqueeze(0)).logits[0].log_softmax(-1)
    chosen = tokens[1:, None]
    with llama_cpp.engine(gguf, 256) as score:
        found = score(tokens).log_softmax(-1)
        difference = (found[:-1].gather(1, chosen) - expected[:-1].gather(1, chosen)).abs().mean()
        assert difference < TOLERANCES[format]
        if not format.startswith("q"):
            continued = generate_greedily(model, tokens.unsqueeze(0), new_tokens=12)[0]
            assert torch.equal(score(continued[:-1]).argmax(-1)[-12:], continued[-12:])


def test_a_folder_that_names_code_is_not_converted(exported, tmp_path):
    """The converter reads tokenizers with trust_remote_code=True."""
    folder = shutil.copytree(exported, tmp_path / "hf")
    config = folder / "tokenizer_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    with pytest.raises(ConversionError, match=r"tokenizer_config.json: names code \(auto_map\)"):
        llama_cpp.write_gguf(folder, tmp_path / "model.gguf", "f16")


def test_what_cannot_be_converted_is_one_line(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "hf")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["Unknown"]}))
    with pytest.raises(ConversionError, match=r"hf: llama.cpp cannot convert it to q4_k_m: .*Unknown"):
        llama_cpp.write_gguf(folder, tmp_path / "model.gguf", "q4_k_m")
    (tmp_path / "model.gguf").write_bytes(b"GGUF?")
    with (
        pytest.raises(ConversionError, match=r"model.gguf: llama.cpp cannot load it"),
        llama_cpp.engine(tmp_path / "model.gguf", 8),
    ):
        pass
