"""A stock export in llama.cpp: its own converter reads the folder, and its log-probabilities are those of transformers.

Needs the package llama-cpp-python, and the environment variable LLAMA_CPP: a folder with its sources, which
hold convert_hf_to_gguf.py (those that llama-cpp-python is built from will do).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.conversion.trained_model import open_trained
from pipeline.conversion.verify import probe_maker
from pipeline.data.tokenizer import load_tokenizer
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, generate_greedily, save_many, scale
from tests.distributed import run_ranks

CONVERTER = Path(os.environ.get("LLAMA_CPP", "/nowhere")) / "convert_hf_to_gguf.py"
# The mean difference of a token's log-probability: formats round weights; in Q8_0 llama.cpp rounds activations, too.
FORMATS = {"f32": 1e-3, "bf16": 2e-2, "f16": 5e-3, "q8_0": 1e-1}

llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not tested: pip install llama-cpp-python gguf")
if not CONVERTER.is_file():
    pytest.skip(f"llama.cpp is not tested: LLAMA_CPP names no folder with {CONVERTER.name}", allow_module_level=True)


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


@pytest.mark.parametrize(("format", "tolerance"), FORMATS.items())
def test_llama_cpp_computes_what_transformers_does(exported, tmp_path, format, tolerance):
    gguf = tmp_path / "model.gguf"
    command = [sys.executable, str(CONVERTER), str(exported), "--outtype", format, "--outfile", str(gguf)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

    tokenizer = load_tokenizer(STORIES).reference
    text = "Once upon a time there was a little girl named Lily. She liked to play"
    tokens = torch.tensor([[1, *tokenizer.encode([text]).ids.tolist()]])
    model = load_hf_model(exported, torch.float32)
    served = llama_cpp.Llama(str(gguf), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    served.eval(tokens[0].tolist())
    with torch.no_grad():
        expected = model(tokens).logits[0].log_softmax(-1)
    found = torch.from_numpy(served.scores[: tokens.shape[1]].copy()).log_softmax(-1)
    chosen = tokens[0, 1:, None]
    difference = (found[:-1].gather(1, chosen) - expected[:-1].gather(1, chosen)).abs().mean()
    assert difference < tolerance
    if format != "q8_0":
        continuation = generate_greedily(model, tokens, new_tokens=12)[0, tokens.shape[1] :].tolist()
        served.reset()
        answers = served.generate(tokens[0].tolist(), temp=0.0, repeat_penalty=1.0)
        assert [next(answers) for _ in range(12)] == continuation
