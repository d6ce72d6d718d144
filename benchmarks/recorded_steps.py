"""Steps under real DeepSpeed that count what they hold and send: of real ranks, or of one of many
on fake tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.messages import Messages
from pipeline.config.run import RunConfig
from pipeline.model import output
from pipeline.model.attention import Documents
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameters import quantization_of
from pipeline.parallel.topology import SINGLE, Layout, ProcessGroups, TensorParallel
from pipeline.sizing.live_memory import LiveMemory

COLLECTIVES = {
    "all-gather": "allgather_base",
    "reduce-scatter": "reduce_scatter_base",
    "all-reduce": "allreduce",
    "all-to-all": "alltoall_base",
}
"""The estimate's names, and torch's."""


def real_batch(config: RunConfig) -> tuple[Tensor, Tensor, Tensor, Documents | None]:
    """Tokens, targets, positions and documents of a micro-batch."""
    shape = config.schedule.micro_batch_size, config.data.sequence_length
    tokens = torch.arange(shape[0] * shape[1]).reshape(shape) % 500
    documents = Documents.whole_rows(tokens) if config.data.document_mask else None
    return tokens, tokens, torch.arange(shape[1]).expand(shape), documents


def real_model(
    config: RunConfig,
    dtype: torch.dtype,
    tp: TensorParallel = SINGLE,
    spec: DecoderSpec | None = None,
) -> CausalDecoder:
    """The run's model with random values; `spec` is that of its base, where it is read already."""
    from pipeline.methods.build_model import build_model

    torch.set_default_dtype(dtype)
    model = build_model(config, spec or read_spec(config.base), tp)
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        quantization = quantization_of(parameter)
        if quantization is None:
            nn.init.normal_(parameter, std=0.02)
        else:
            shape = quantization.rows, quantization.columns
            quantization.write(parameter, 0.02 * torch.randn(shape))
    return model


def simulated_steps(config: RunConfig, gpus: int) -> dict[str, Any]:
    """The same of rank 0 of `gpus` that do not exist, on tensors without values.

    And what a micro-batch adds: until the loss (`forward`: activations, and what ZeRO-3 gathers),
    and at the `peak`.
    """
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus)}
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    from deepspeed.runtime.zero import partitioned_param_coordinator

    from pipeline.training.deepspeed_internals.lifecycle import init_distributed
    from pipeline.training.launch import COLLECTIVE_TIMEOUT

    init_distributed("gloo", COLLECTIVE_TIMEOUT)

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: (
        None
    )  # there are no others
    spec = read_spec(config.base)  # from numbers, which such tensors have not
    # To torch the tensors are a CPU's. The loss takes the chunks of a GPU, for which the estimate is.
    as_on_a_gpu = patch.object(output, "CHUNK_ELEMENTS", output.GPU_CHUNK_ELEMENTS)
    with as_on_a_gpu, FakeTensorMode(allow_non_fake_inputs=True), _Simulation() as live:
        return last_of_three_steps(config, live, spec)


class _Simulation(LiveMemory):
    """Zero for those who ask for a value. Adam's kernel, which fake tensors lack, is left out: it
    changes no size."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if (kwargs or {}).get("device") == torch.device("meta"):  # no memory, in a run either
            return operation(*args, **kwargs)
        return (
            None
            if "_fused_adamw" in str(operation)
            else super().__torch_dispatch__(operation, types, args, kwargs)
        )


def last_of_three_steps(
    config: RunConfig, live: LiveMemory | None = None, spec: DecoderSpec | None = None
) -> dict[str, Any]:
    """What the last of three steps of this rank sent, and the most that it held."""
    from pipeline.deepspeed_config import accumulation_steps, load_deepspeed_config
    from pipeline.training.batches import MicroBatch
    from pipeline.training.engine import Engine

    layout = Layout(dist.get_world_size(), config.parallel.tp_size)
    groups = ProcessGroups(layout, sequence_parallel=config.parallel.sequence_parallel)
    deepspeed_config = load_deepspeed_config(config.deepspeed, layout)
    model = real_model(config, deepspeed_config.dtype, groups.tensor_parallel, spec)
    held: Counter[str] = Counter()

    def before_loss(*_: Any) -> None:
        assert live is not None
        held["forward"] = live.now - before

    if live is not None:
        # Fake tensors cannot be moved, and are where they belong.
        vars(model)["_apply"] = lambda *_: model
        model.output.register_forward_pre_hook(before_loss)
    with Messages() as start:
        engine = Engine(model, config, deepspeed_config, groups)
    batch = MicroBatch(*real_batch(config))
    for _ in range(3):  # DeepSpeed learns the order of the modules in the first two
        with Messages() as messages:
            for _ in range(accumulation_steps(config.schedule, layout.dp_size)):
                if live is not None:
                    before = live.peak = live.now
                total, *_ = engine.loss(batch)
                engine.backward(total)
                del total
                held |= held_bytes(engine)  # the most of each kind
                engine.end_micro_batch(1e-3)
    moments = _adam_states(engine._engine.optimizer)
    held["optimizer"] += _bytes(moments)
    held["adam_elements"] = sum(tensor.numel() for tensor in moments)
    held["peak"] = 0 if live is None else live.peak
    engine._engine.destroy()
    return {"held": dict(held), "messages": messages.sent, "start": start.sent}


def payloads(messages: Iterable[tuple[str, int, int]]) -> Counter[tuple[str, int]]:
    """The bytes sent by collective and group size, without messages of one number: a norm, or
    whether it is finite."""
    sent: Counter[tuple[str, int]] = Counter()
    for name, length, group_size in messages:
        if group_size > 1 and length > 8:
            sent[name, group_size] += length
    return sent


def held_bytes(engine: Any) -> Counter[str]:
    """What DeepSpeed's own objects hold, by kind, without the Adam moments."""
    optimizer = engine._engine.optimizer
    parameters = list(engine.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    match type(optimizer).__name__:
        case "BF16_Optimizer":
            weights = parameters
            masters = optimizer.fp32_groups_flat_partition
            gradients += optimizer.fp32_groups_gradients_flat
        case "DeepSpeedZeroOptimizer":
            weights = parameters
            masters = optimizer.single_partition_of_fp32_groups
            for group in optimizer.averaged_gradients.values():
                if group is not None:
                    gradients += group
        case "DeepSpeedZeroOptimizer_Stage3":
            weights = [parameter.ds_tensor for parameter in parameters]
            weights += [parameter.data for parameter in parameters if parameter.ds_persist]
            masters = optimizer.fp32_partitioned_groups_flat
            gradients += [optimizer.grad_partitions_flat_buffer]
    return Counter(weights=_bytes(weights), gradients=_bytes(gradients), optimizer=_bytes(masters))


def _adam_states(optimizer: Any) -> list[Tensor]:
    moments = []
    for state in optimizer.optimizer.state.values():
        for name, value in state.items():
            if name.startswith("exp_avg"):
                moments.append(value)
    return moments


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors; several views of one storage count once."""
    spans = {
        (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.nbytes)
        for tensor in tensors
    }
    return sum(length for *_, length in spans)
