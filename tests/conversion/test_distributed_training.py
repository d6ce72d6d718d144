"""Exports that other libraries train on several ranks, with weight decay: what is frozen by its
meaning, a fitted gate, stays to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.config.run import load_config
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.hf.load import load_hf_model
from tests.distributed import run_ranks
from tests.extensions.hosted.bases import save_hosted
from tests.extensions.hosted.test_export import gated
from tests.extensions.hosted.test_gate import ADAPT
from tests.training.runs import make_run, train
from tests.widened import some_tokens

Started = tuple[Callable[[torch.Tensor], None], Any]
"""A step of training on tokens [B, S], and the model that it trains."""
RANKS = 2
STEPS = 3
LENGTH = 16
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 1.0
"""Together they shrink a parameter without a gradient by 1 % a step."""
ADDED = r"\.(expansion_to_expansion|adapter)\."
SOURCES = {
    "adapt": ("llama tied", "adapt"),
    "lora with own rows": ("neox", "own lora"),
    "runs twice below its gate": ("llama", "own adapt from 0"),
}
WAYS = ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3 from zero.Init"]


@pytest.fixture(scope="module")
def hosted_export(tokens, tmp_path_factory) -> Path:
    """An export on a hosted base, whose gate opens for some tokens."""
    folder = tmp_path_factory.mktemp("hosted")
    path = make_run(
        folder / "run",
        tokens,
        zero=1,
        base=str(save_hosted("llama", folder / "base")),
        base_code="transformers",
        method=ADAPT,
        schedule__steps=2,
        schedule__learning_rate=0.02,
    )
    run_ranks(train, 1, path)
    config = load_config(path)
    gate = gated(config, folder / "gate", "sometimes")
    output = folder / "export"
    assert convert(
        Conversion(newest_checkpoint(config), config.base, output, gate=gate), probe_maker({})
    )
    return output


@pytest.fixture
def export(exports, request):
    """The folder of an export by its name in SOURCES, or "hosted"."""

    def folder(name: str) -> Path:
        if name == "hosted":
            return request.getfixturevalue("hosted_export")
        return exports(*SOURCES[name], opens="sometimes")[0]

    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*SOURCES, "hosted"])
def test_trained_with_weight_decay_a_gate_stays_to_the_bit(name, way, export):
    folder = export(name)
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    gate = {key: tensor for key, tensor in stored.items() if key.startswith("token_gate.")}
    assert {"token_gate.mean", "token_gate.std", "token_gate.weight"} <= gate.keys()
    for found, changed in run_ranks(trained, RANKS, folder, way):
        assert found.keys() == gate.keys()
        for key, tensor in gate.items():
            assert torch.equal(found[key], tensor), key
        assert changed > 0.1 * LEARNING_RATE


def trained(folder: Path, way: str) -> tuple[dict[str, torch.Tensor], float]:
    """This rank's gate after a few steps, and the largest change of another parameter."""
    rank = torch.distributed.get_rank()
    step, model = STARTS[way.split()[0]](folder, way)
    watched = next(key for key, _ in model.named_parameters() if re.search(ADDED, key))
    before = whole(model, watched)
    for number in range(STEPS):
        tokens = some_tokens(model.config, 2, LENGTH, seed=RANKS * number + rank)
        step(tokens)
    gate = {}
    for key, tensor in model.token_gate.state_dict(prefix="token_gate.").items():
        gate[key] = tensor.detach().clone()
    return gate, float((whole(model, watched) - before).abs().max())


def start_ddp(folder: Path, _: str) -> Started:
    """DDP in fp32, which expects a gradient of every parameter in every step."""
    model = load_hf_model(folder).train()
    checkpoint_activations(model)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return partial(_step, wrapped, optimizer), model


def start_fsdp2(folder: Path, _: str) -> Started:
    """FSDP2 with weights in bf16, each layer by itself."""
    model = load_hf_model(folder, torch.bfloat16).train()
    checkpoint_activations(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    # What Trainer wraps: the classes that a model names, and the whole of it.
    names = model._no_split_modules or ()
    for module in [one for one in model.modules() if type(one).__name__ in names]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return partial(_step, model, optimizer), model


def start_deepspeed(folder: Path, way: str) -> Started:
    """A stage of ZeRO in bf16; "from zero.Init": the model is partitioned as it is loaded."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    values = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(way[4])},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY,
                "torch_adam": True,
            },
        },
    }
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    partitioned = HfDeepSpeedConfig(values) if way.endswith("zero.Init") else None
    model = load_hf_model(folder, torch.bfloat16).train()
    del partitioned
    engine, *_ = deepspeed.initialize(model=model, config=values)

    def step(tokens: torch.Tensor) -> None:
        engine.backward(engine(tokens, labels=tokens, use_cache=False).loss)
        engine.step()

    return step, model


def checkpoint_activations(model: Any) -> None:
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: Any, name: str) -> torch.Tensor:
    """A copy of a parameter, of which this rank may hold a part."""
    parameter = model.get_parameter(name)
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().float().clone()
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().float()
    return parameter.detach().float().clone()


STARTS = {
    "ddp": start_ddp,
    "fsdp2": start_fsdp2,
    "zero1": start_deepspeed,
    "zero2": start_deepspeed,
    "zero3": start_deepspeed,
}
