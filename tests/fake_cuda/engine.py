"""Steps of DeepSpeed's own engine on a CUDA device without values; what a real one would stumble over.

    LD_PRELOAD=device.so python -m tests.fake_cuda.engine zero1/adapt "zero3 tight/lora" zero1/fft/muon

Rank 0 of four, two of them tensor-parallel: gradient buckets, reductions, clipping, master weights
and ZeRO-3's gathers, around our model. Prints a JSON object for each, as `tests.fake_cuda.trace`.
DeepSpeed's accelerator is the one for CPUs, which has no streams, but names the device.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.recorded_steps import real_batch, real_model
from pipeline.deepspeed_config import accumulation_steps, load_deepspeed_config
from pipeline.model.from_hf import read_spec
from pipeline.optimizers import divided_matrices
from pipeline.parallel.topology import Layout, ProcessGroups
from tests.fake_cuda.trace import DEVICE, Case, Faults, WatchedKernels, as_on_a_gpu
from tests.sizing.real_runs import run_config
from tests.training.runs import start_deepspeed

LAYOUT = Layout(4, 2)


class WatchedEngine(WatchedKernels):
    """Leaves out Adam's kernel, and answers zero where the host asks for a value."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults, answer=0)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "_fused_adamw" in str(operation):
            return None  # fake tensors have no such kernel; it changes no size
        return super().__torch_dispatch__(operation, types, args, kwargs)


def start_ranks() -> None:
    """Starts DeepSpeed on rank 0 of ranks that do not exist, with the device for its own tensors."""
    world_size = LAYOUT.world_size
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    start_deepspeed()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator

    def device_name(index: int | None = None) -> str:
        if index is None:
            return "cuda"
        return f"cuda:{index}"

    # It compares numbers with those of other ranks, which do not exist.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
    accelerator = get_accelerator()
    accelerator.device_name = device_name
    accelerator.current_device_name = lambda: str(DEVICE)
    accelerator.device = lambda index=None: DEVICE
    # Ranks tell each other what they hold of each matrix: here as much as this one.
    divided_matrices._held_by_all = lambda shards, layout: [
        [(one.first, one.length)] * layout.world_size for one in shards
    ]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # torch's broadcast asks for it


def traced(case: str) -> Faults:
    """The faults of the second step of ZERO/METHOD, perhaps with an optimizer behind it; the first
    also makes what later ones keep."""
    from pipeline.training.batches import MicroBatch
    from pipeline.training.engine import Engine

    zero, method, *optimizer = case.split("/")
    changes = {}
    if optimizer:
        changes["schedule__optimizer"] = optimizer[0]
    config = run_config(Path(tempfile.mkdtemp()), zero, method, LAYOUT, **changes)
    spec = read_spec(config.base)
    faults = Faults()
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_a_gpu(Case.of("adapt/llama")):
        groups = ProcessGroups(LAYOUT)
        deepspeed_config = load_deepspeed_config(config.deepspeed, LAYOUT)
        with DEVICE:
            model = real_model(config, deepspeed_config.dtype, groups.tensor_parallel, spec)
        model._apply = lambda *_: model  # fake tensors cannot be moved, and are where they belong
        tokens, targets, positions, documents = real_batch(config)
        if documents is not None:
            documents = documents.moved(lambda tensor: tensor.to(DEVICE))
        batch = MicroBatch(tokens.to(DEVICE), targets.to(DEVICE), positions.to(DEVICE), documents)
        with WatchedEngine(faults):
            engine = Engine(model, config, deepspeed_config, groups)
        for _ in range(2):
            faults.found.clear()
            with WatchedEngine(faults):
                for _ in range(accumulation_steps(config.schedule, LAYOUT.dp_size)):
                    total, *_ = engine.loss(batch)
                    engine.backward(total)
                    del total
                    engine.end_micro_batch(1e-3)
    return faults


def main() -> None:
    start_ranks()
    for case in sys.argv[1:]:
        faults = traced(case)
        result = {
            "case": case,
            "operations": faults.operations,
            "faults": sorted(set(faults.found)),
        }
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
