"""Converting, verification included, holds a few tensors at a time, however large the model."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, save, scale
from tests.distributed import run_ranks

MIB = 2**20
ROOT = Path(__file__).parents[2]
EXPANSION = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1}

# Anonymous memory is what the machine must have; pages of mapped files can be dropped at any time.
_CONVERT = """
import sys, threading, time
from pathlib import Path
import pipeline.conversion.hf_model
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.probe import probe_maker

def held():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

def watch():
    global most
    while True:
        most = max(most, held())
        time.sleep(0.002)

before = most = held()
threading.Thread(target=watch, daemon=True).start()
checkpoint, base, output, format, text = sys.argv[1:]
convert(Conversion(Path(checkpoint), Path(base), Path(output), format=format), probe_maker({"a sentence": [text]}))
print(most - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A base of 390 MiB in files of at most 26 MiB, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=96, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 380 * MIB
    model.save_pretrained(folder / "base", max_shard_size="25MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "base" / name).write_bytes((STORIES / name).read_bytes())
    method = scale("adapt", norm="base", expansion=EXPANSION)
    run_ranks(partial(save, steps=1), 1, folder / "base", method, folder / "run")
    return folder


@pytest.mark.parametrize("format", ["scale", "stock"])
def test_peak_memory_is_far_below_the_model(format, large, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a cat.")  # short: its activations are not what is measured
    arguments = [checkpoint_in(large / "run", steps=1), large / "base", tmp_path / "out", format, text]
    # glibc gives large blocks back to the system when they are freed; a small model needs that of small blocks as well.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB // 16)}
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # A third of the model. Verifying holds a layer in fp64, some 10 MiB with its expansion; some 75 MiB are torch's and
    # the libraries' own.
    assert int(done.stdout) < 130 * MIB
