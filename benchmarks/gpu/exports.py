"""An exported model as servers run it: in a CUDA graph, with weights offloaded to the host, and in
vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.setting import CheckRow, Setting
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM

_ROTARY = {
    "frequencies": [1.0, 0.1, 0.01, 0.001],
    "long_frequencies": [0.5, 0.05, 0.005, 0.0005],
    "attention_factor": 1.0,
    "context": 16,
    "theta": None,
    "factor": None,
}
_SERVE = """
import json, sys, scale_cpt_serving
scale_cpt_serving.register()
from vllm import LLM, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
model = LLM(sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=64, gpu_memory_utilization=0.5)
(answer,) = model.generate({"prompt_token_ids": json.loads(sys.argv[2])}, greedy)
print("found", json.dumps(list(answer.outputs[0].token_ids)))
"""


@torch.no_grad()
def check_exports(setting: Setting) -> Iterator[CheckRow]:
    """A tied, routed model with a scaled embedding and frequencies that depend on the text's
    length."""
    config = ScaleConfig(
        rotary=[_ROTARY],
        layer_rotary=[0, 0],
        embedding_scale=8.0,
        tie_word_embeddings=True,
        routed=True,
        l_fp=1,
    )
    model = ScaleForCausalLM(config).to(setting.device).eval()
    tokens = torch.randint(config.vocab_size, (1, 24), device=setting.device)
    expected = model(tokens, use_cache=False).logits
    what, captured = "an exported model is captured in a CUDA graph", None
    if setting.on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(tokens, use_cache=False).logits
        graph.replay()
    found = (
        "seen on a GPU only"
        if captured is None
        else f"off by {float((captured - expected).abs().max()):.1e}"
    )
    yield CheckRow(what, None if captured is None else torch.equal(captured, expected), found)
    what = "the same with its weights on the host, a tied output among them"
    if find_spec("accelerate") is None:
        yield CheckRow(what, None, "skipped: accelerate not installed")
    else:
        from accelerate import cpu_offload

        cpu_offload(model, execution_device=setting.device)
        off = float((model(tokens, use_cache=False).logits - expected).abs().max())
        yield CheckRow(what, off == 0, f"off by {off:.1e}")
    yield _check_vllm(setting)


def _check_vllm(setting: Setting) -> CheckRow:
    """vLLM's engine, as `vllm serve` runs it, and transformers continue a text with a gated model
    in bf16."""
    what = "vLLM continues a text as transformers does"
    if find_spec("vllm") is None or not setting.on_gpu:
        return CheckRow(
            what, None, "vLLM is not installed" if setting.on_gpu else "seen on a GPU only"
        )
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 3}
    added = {"expansion_num_attention_heads": 2, "expansion_num_key_value_heads": 1}
    rotary = {
        **_ROTARY,
        "frequencies": [0.5**n for n in range(32)],
        "long_frequencies": None,
        "context": None,
    }
    config = ScaleConfig(
        **sizes,
        **added,
        rotary=[rotary],
        layer_rotary=[0, 0],
        tie_word_embeddings=True,
        l_fp=1,
        gate_layer=1,
    )
    model = ScaleForCausalLM(config).to(setting.device, torch.bfloat16).eval()
    model.token_gate.float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(config.vocab_size, (1, 24), device=setting.device)
    expected = model.generate(
        tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        serving = Path(__file__).parents[2] / "serving"
        done = subprocess.run(
            [sys.executable, "-c", _SERVE, folder, json.dumps(tokens[0].tolist())],
            env={**os.environ, "PYTHONPATH": str(serving), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    found = [
        json.loads(line.removeprefix("found "))
        for line in done.stdout.splitlines()
        if line.startswith("found ")
    ]
    said = f"found {found[0]}" if found else done.stderr.strip().rpartition("\n")[2][:200]
    return CheckRow(what, found == [expected[0, 24:].tolist()], said)
