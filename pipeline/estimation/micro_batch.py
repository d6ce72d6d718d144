"""One micro-batch, forward and backward, on tensors without data: what it holds, what it sends, what it fetches.

The model that runs is the one that would train, on the kernels that a CPU would choose: its fused attention keeps
queries, keys, values, results and one number a row, as a GPU's does. So frozen parts, every method, Route's second path
and recomputed layers count as what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from pipeline.config.run import RunConfig
from pipeline.estimation.gathering import Fetch
from pipeline.estimation.live_memory import LiveMemory
from pipeline.methods import training_method
from pipeline.methods.method import ActivationCheckpointing
from pipeline.model.decoder import Decoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameter import default_dtype
from pipeline.parallel.topology import TensorParallel, check_sequence_length


@dataclass(frozen=True)
class Message:
    """One message of tensor parallelism, over `group_size` neighbouring ranks.

    `collective` is `all-reduce`, `all-gather` or `reduce-scatter`; the payload is the longer of what is given and got.
    """

    collective: str
    group_size: int
    payload_bytes: int


@dataclass(frozen=True)
class MicroBatchCosts:
    """What one rank's micro-batch costs.

    Attributes:
        activation_bytes: held when the forward pass reaches the output projection.
        loss_bytes: what the output projection holds beside them at most: a chunk of logits, and the gradients that the
            loss computes ahead.
        temporary_bytes: what the backward pass holds beyond both at its largest moment.
        messages: those of tensor parallelism.
        fetches: the modules with parameters of their own, in the order in which they run.
        parameter_sizes, trained_sizes: the elements of this rank's shards; fetches name the former by index.
    """

    activation_bytes: int
    loss_bytes: int
    temporary_bytes: int
    messages: tuple[Message, ...]
    fetches: tuple[Fetch, ...]
    parameter_sizes: tuple[int, ...]
    trained_sizes: tuple[int, ...]


class RecordingGroup(dist.ProcessGroup):
    """A process group of one rank's imagination: it notes what it is given, and sends nothing."""

    def __init__(self, size: int, messages: list[Message]) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # the stub knows another constructor only
        self._messages = messages

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        """Notes the message."""
        self._note("all-reduce", *tensors)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        """Notes the message."""
        self._note("all-gather", output)

    def reduce_scatter_single(self, own: Tensor, given: Tensor, options: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        """Notes the message."""
        self._note("reduce-scatter", given)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _note(self, collective: str, *tensors: Tensor) -> None:
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._messages.append(Message(collective, self.size(), payload))


def imagined_ranks(tp_size: int, messages: list[Message], *, sequence_parallel: bool = False) -> TensorParallel:
    """The first of `tp_size` tensor-parallel ranks, without the others; what it would send goes to `messages`."""
    if tp_size == 1:
        return TensorParallel()
    shared = [size for size in range(2, tp_size) if tp_size % size == 0]
    groups = tuple((size, RecordingGroup(size, messages)) for size in shared)
    return TensorParallel(0, tp_size, RecordingGroup(tp_size, messages), groups, sequence_parallel)


def measure_micro_batch(
    config: RunConfig,
    spec: DecoderSpec,
    tp_size: int,
    activation_checkpointing: ActivationCheckpointing,
    dtype: torch.dtype,
) -> MicroBatchCosts:
    """Runs one micro-batch of the run `config` on the base `spec`, as the first of `tp_size` ranks.

    Raises:
        UserError: the model, or its sequences, cannot lie on `tp_size` ranks.
    """
    messages: list[Message] = []
    tp = imagined_ranks(tp_size, messages, sequence_parallel=config.parallel.sequence_parallel)
    check_sequence_length(config.data.sequence_length, tp)
    with FakeTensorMode():
        with default_dtype(dtype):
            model = training_method(config).build(spec, tp, activation_checkpointing)
        shape = config.schedule.micro_batch_size, config.data.sequence_length
        tokens = torch.zeros(shape, dtype=torch.long)
        document_ids = torch.zeros(shape, dtype=torch.long) if config.data.document_mask else None
        batch = (tokens, tokens, tokens, document_ids)
        memory, fetches = _watch(model, batch)
    sizes = tuple(parameter.numel() for parameter in model.parameters())
    trained = tuple(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return MicroBatchCosts(*memory, tuple(messages), tuple(fetches), sizes, trained)


def _watch(model: Decoder, batch: tuple[Tensor | None, ...]) -> tuple[tuple[int, int, int], list[Fetch]]:
    """Memory as (activations, loss, temporary), and the fetches."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            # As ZeRO does once it has reduced a gradient; what it then holds is counted apart.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with LiveMemory(*model.parameters()) as live, _fetches_of(model) as fetches:
        forward_peak: list[int] = []
        at_loss: list[int] = []

        def before_loss(*_: object) -> None:
            forward_peak.append(live.peak)
            at_loss.append(live.now)
            live.restart_peak()

        hook = model.output.register_forward_pre_hook(before_loss)
        total, *_ = model(*batch)
        hook.remove()
        activations = at_loss[0]
        loss = live.peak - activations
        total.backward()
    return (activations, loss, max(*forward_peak, live.peak) - activations - loss), fetches


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _fetches_of(model: Decoder) -> Iterator[list[Fetch]]:
    """The fetches of what runs inside: where DeepSpeed's ZeRO-3 hooks gather the parameters of a module."""
    index_of = {parameter: index for index, parameter in enumerate(model.parameters())}
    fetches: list[Fetch] = []
    hooks = []

    def watch(module: nn.Module) -> None:
        own = tuple(index_of[parameter] for parameter in module.parameters(recurse=False))
        if not own:
            return

        def before(_: nn.Module, inputs: Any) -> None:  # noqa: ANN401
            fetches.append(Fetch(own, releases=True))

        def after(_: nn.Module, inputs: Any, outputs: Any) -> None:  # noqa: ANN401
            # Where no input wants a gradient, DeepSpeed never learns that the module's backward pass is over.
            releases = any(tensor.requires_grad for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor))
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: fetches.append(Fetch(own, releases)))

        hooks.append(module.register_forward_pre_hook(before))
        hooks.append(module.register_forward_hook(after))

    for module in model.modules():
        watch(module)
    try:
        yield fetches
    finally:
        for hook in hooks:
            hook.remove()
