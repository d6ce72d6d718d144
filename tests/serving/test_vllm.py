"""The model in vLLM: registered through its plugin interface, built and filled by its own loader.

vLLM's attention kernels do not run on every machine that can import it. They are replaced here by exact attention over
the one text of a batch: what is tested is all but the kernels and the paged cache.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
pytest.importorskip("vllm", reason="vLLM is not tested: pip install vllm, in an environment of its own")

from pipeline.conversion.formats import choose_export
from pipeline.conversion.hf_folder import load_hf_model, write_hf_folder
from tests.bases import STORIES
from tests.conversion.checkpoints import save_many, scale, trained, training_decoder
from tests.distributed import run_ranks
from tests.gating.gates import random_gate
from tests.tolerances import assert_near, rounding_of
from tests.widened import some_tokens

SERVING = Path(__file__).parents[2] / "serving"
MODELS = {
    "adapt": scale("adapt", collaborative_modules="both", l_fp=2),
    "route": scale("route", l_fp=2, router_threshold=0.9),
    "gated": scale("adapt", l_fp=2),
}
DTYPES = {"gated": torch.bfloat16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    run_ranks(save_many, 1, [(STORIES, method, folder / name) for name, method in MODELS.items()])
    for name in MODELS:
        (folder / f"{name}-hf").mkdir()
        model = trained(STORIES, folder / name)
        if name == "gated":
            decoder = training_decoder(model)
            model = replace(model, gate=random_gate(decoder, some_tokens(decoder.spec, 4, 24), features="token"))
        export = choose_export(model, "scale", DTYPES.get(name, torch.float32))
        write_hf_folder(folder / f"{name}-hf", export, STORIES)
    return {name: folder / f"{name}-hf" for name in MODELS}


@pytest.fixture(scope="module")
def registered():
    sys.path.insert(0, str(SERVING))
    import scale_cpt_serving

    scale_cpt_serving.register()
    yield scale_cpt_serving
    sys.path.remove(str(SERVING))


class ExactAttention(torch.nn.Module):
    """In place of vLLM's `Attention`, whose sizes it takes: flat [N, H K] -> [N, H K], for one text."""

    def __init__(self, served):
        super().__init__()
        self.heads, self.kv_heads, self.size = served.num_heads, served.num_kv_heads, served.head_size

    def forward(self, query, key, value):
        query = query.view(1, -1, self.heads, self.size).transpose(1, 2)
        key, value = (heads.view(1, -1, self.kv_heads, self.size).transpose(1, 2) for heads in (key, value))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2).reshape(-1, self.heads * self.size)


@pytest.mark.parametrize("name", MODELS)
def test_vllm_builds_fills_and_runs_it(name, folders, registered):
    from vllm import ModelRegistry
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    assert "ScaleForCausalLM" in ModelRegistry.get_supported_archs()
    dtype = str(DTYPES.get(name, torch.float32)).removeprefix("torch.")
    settings = EngineArgs(model=str(folders[name]), dtype=dtype, enforce_eager=True, max_model_len=64)
    config = settings.create_engine_config()
    assert config.model_config.architecture == "ScaleForCausalLM" and not config.model_config.trust_remote_code
    assert (
        config.model_config.get_num_kv_heads(config.parallel_config) == 6 and config.model_config.get_head_size() == 8
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    expected_model = load_hf_model(folders[name])
    tokens = some_tokens(expected_model.config, 20)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, address, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        try:
            with torch.device("cpu"):
                model = initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
            kv_heads = [layer.attention.served.num_kv_heads for layer in model.model.layers]
            assert kv_heads == ([6, 6, 12, 12, 12] if name == "route" else [6] * 5)
            if name == "gated":  # in 16 bits it would decide otherwise
                found = model.model.token_gate.state_dict()
                assert all(torch.equal(found[it], of) for it, of in expected_model.token_gate.state_dict().items())
                return
            for layer in model.model.layers:
                layer.attention.served = ExactAttention(layer.attention.served)
            with torch.no_grad():
                found = model.compute_logits(model(tokens, torch.arange(20)))
                expected = expected_model(tokens.unsqueeze(0)).logits[0]
                assert_near(found, expected, rounding_of(expected_model.config))
        finally:
            cleanup_dist_env_and_memory()


def test_what_vllm_would_get_wrong_is_refused(registered):
    from scale_cpt_serving.vllm_model import why_not

    config = registered.ScaleConfig()
    assert why_not(config, 1, False) is None
    assert "one rank" in why_not(config, 2, False) and "--quantization" in why_not(config, 1, True)
    config.gate_layer, config.gate_features = 1, "token+running_mean"
    assert "running mean" in why_not(config, 1, False)
    config.gate_layer, config.rotary = None, [{"context": 64}]
    assert "frequencies" in why_not(config, 1, False)
