"""An exported model as servers run it: in a CUDA graph, with weights on the host, and in vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.gpu.setting import CheckRow, Setting
from benchmarks.results import ROOT
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM

# Frequencies that change beyond 16 tokens, as those of Phi-3: the texts here have 24.
_ROTARY = {
    "frequencies": [1.0, 0.1, 0.01, 0.001],
    "long_frequencies": [0.5, 0.05, 0.005, 0.0005],
    "attention_factor": 1.0,
    "context": 16,
    "theta": None,
    "factor": None,
}
# In a process of its own, which gives its share of the GPU's memory back when it ends.
_SERVE = """
import json, sys, scale_cpt_serving
scale_cpt_serving.register()
from vllm import LLM, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
model = LLM(
    sys.argv[1],
    dtype="bfloat16",
    skip_tokenizer_init=True,
    max_model_len=64,
    gpu_memory_utilization=0.5,
)
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
    yield _check_graph(model, tokens, expected, setting)
    yield _check_offloading(model, tokens, expected, setting)
    yield _check_vllm(setting)


def _check_graph(
    model: ScaleForCausalLM, tokens: Tensor, expected: Tensor, setting: Setting
) -> CheckRow:
    """A graph replays kernels with the addresses that it saw: a branch on a value fails in it."""
    check = "an exported model is captured in a CUDA graph"
    if not setting.on_gpu:
        return CheckRow(check, None, "seen on a GPU only")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Not computed yet: the capture only records kernels.
        captured = model(tokens, use_cache=False).logits
    graph.replay()
    off = float((captured - expected).abs().max())
    return CheckRow(check, torch.equal(captured, expected), f"off by {off:.1e}")


def _check_offloading(
    model: ScaleForCausalLM, tokens: Tensor, expected: Tensor, setting: Setting
) -> CheckRow:
    """Accelerate brings a module's weights when the module is called: reading them past the call
    would find none."""
    check = "the same with its weights on the host, a tied output among them"
    if find_spec("accelerate") is None:
        return CheckRow(check, None, "skipped: accelerate not installed")
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=setting.device)
    off = float((model(tokens, use_cache=False).logits - expected).abs().max())
    return CheckRow(check, off == 0, f"off by {off:.1e}")


def _check_vllm(setting: Setting) -> CheckRow:
    """vLLM's engine, as `vllm serve` runs it, and transformers continue a text with a gated model
    in bf16."""
    check = "vLLM continues a text as transformers does"
    if not setting.on_gpu:
        return CheckRow(check, None, "seen on a GPU only")
    if find_spec("vllm") is None:
        return CheckRow(check, None, "vLLM is not installed")
    model = _gated_model(setting)
    tokens = torch.randint(model.config.vocab_size, (1, 24), device=setting.device)
    continued = model.generate(
        tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    expected = continued[0, 24:].tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        done = subprocess.run(
            [sys.executable, "-c", _SERVE, folder, json.dumps(tokens[0].tolist())],
            # One process, so that its error is in what it prints.
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "serving"),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    # vLLM prints messages of its own around the answer.
    for line in done.stdout.splitlines():
        if line.startswith("found "):
            found = json.loads(line.removeprefix("found "))
            return CheckRow(check, found == expected, f"found {found}")
    return CheckRow(check, False, done.stderr.strip().rpartition("\n")[2][:200])


def _gated_model(setting: Setting) -> ScaleForCausalLM:
    """A small model in bf16 whose heads are of a size that vLLM's attention kernels take."""
    rotary = {
        **_ROTARY,
        "frequencies": [0.5**n for n in range(32)],
        # One table of frequencies for all lengths; the graph above has two.
        "long_frequencies": None,
        "context": None,
    }
    config = ScaleConfig(
        hidden_size=256,
        head_dim=64,
        num_attention_heads=6,
        num_key_value_heads=3,
        expansion_num_attention_heads=2,
        expansion_num_key_value_heads=1,
        rotary=[rotary],
        layer_rotary=[0, 0],
        tie_word_embeddings=True,
        l_fp=1,
        gate_layer=1,
    )
    model = ScaleForCausalLM(config).to(setting.device, torch.bfloat16).eval()
    for parameter in model.parameters():
        # Large enough that the most likely token is so by far: rounding does not choose another.
        torch.nn.init.normal_(parameter, std=0.2)
    torch.nn.init.normal_(model.token_gate.weight, std=0.2)
    return model
