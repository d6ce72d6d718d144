"""An exported model as servers run it: captured in a CUDA graph, and with weights that are offloaded to the host."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from benchmarks.gpu.setting import Row, Setting
from pipeline.conversion.modeling_scale import ScaleConfig, ScaleForCausalLM

_ROTARY = {
    "frequencies": [1.0, 0.1, 0.01, 0.001],
    "long_frequencies": [0.5, 0.05, 0.005, 0.0005],
    "attention_factor": 1.0,
    "context": 16,
    "theta": None,
    "factor": None,
}


@torch.no_grad()
def check_exports(setting: Setting) -> Iterator[Row]:
    """A tied, routed model with a scaled embedding and frequencies that depend on the text's length."""
    config = ScaleConfig(
        rotary=[_ROTARY], layer_rotary=[0, 0], embedding_scale=8.0, tie_word_embeddings=True, routed=True, l_fp=1
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
    found = "seen on a GPU only" if captured is None else f"off by {float((captured - expected).abs().max()):.1e}"
    yield Row(what, None if captured is None else torch.equal(captured, expected), found)
    what = "the same with its weights on the host, a tied output among them"
    if find_spec("accelerate") is None:
        yield Row(what, None, "skipped: accelerate not installed")
        return
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=setting.device)
    off = float((model(tokens, use_cache=False).logits - expected).abs().max())
    yield Row(what, off == 0, f"off by {off:.1e}")
