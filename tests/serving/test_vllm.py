"""The model in vLLM: registered through its plugin interface, built and filled by its own loader.

vLLM's attention kernels do not run on every machine that can import it. They are replaced here by exact attention over
the one text of a batch: what is tested is all but the kernels and the paged cache.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
pytest.importorskip("vllm", reason="vLLM is not tested: pip install vllm, in an environment of its own")

from pipeline.conversion.hf_folder import load_hf_model
from tests.serving.test_vllm_model import ExactAttention
from tests.tolerances import assert_near, rounding_of
from tests.widened import some_tokens

SERVING = Path(__file__).parents[2] / "serving"
MODELS = {"adapt": "adapt stories", "route": "route stories"}


@pytest.fixture(scope="module")
def registered():
    sys.path.insert(0, str(SERVING))
    import scale_cpt_serving

    scale_cpt_serving.register()
    yield scale_cpt_serving
    sys.path.remove(str(SERVING))


@pytest.mark.parametrize("name", MODELS)
def test_vllm_builds_fills_and_runs_it(name, exports, registered):
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

    folder, _ = exports("stories260K", MODELS[name])
    assert "ScaleForCausalLM" in ModelRegistry.get_supported_archs()
    settings = EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, max_model_len=64)
    config = settings.create_engine_config()
    assert config.model_config.architecture == "ScaleForCausalLM" and not config.model_config.trust_remote_code
    assert (
        config.model_config.get_num_kv_heads(config.parallel_config) == 6 and config.model_config.get_head_size() == 8
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    expected_model = load_hf_model(folder)
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
            for layer in model.model.layers:
                served = layer.attention.served
                layer.attention.served = ExactAttention(
                    served.num_heads, served.head_size, served.scale, served.num_kv_heads
                )
            with torch.no_grad():
                found = model.compute_logits(model(tokens, torch.arange(20)))
                expected = expected_model(tokens.unsqueeze(0)).logits[0]
                assert_near(found, expected, rounding_of(expected_model.config))
        finally:
            cleanup_dist_env_and_memory()
