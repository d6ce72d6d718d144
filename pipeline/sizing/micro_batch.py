"""One micro-batch, forward and backward, on tensors without data: what it holds, what it sends, what it uses.

The model that runs is the one that would train, with the kernels that a CPU would choose: its fused attention keeps
queries, keys, values, results and one number a row, as a GPU's does. So frozen parts, every method, Route's second path
and recomputed layers count as what they are. Layers that cost the same run once and are multiplied.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.config.run import RunConfig
from pipeline.methods import training_method
from pipeline.methods.method import ActivationCheckpointing
from pipeline.model.decoder import Decoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.sharding import default_dtype
from pipeline.parallel.topology import TensorParallel, check_sequence_length
from pipeline.sizing.gathering import Segment


@dataclass(frozen=True)
class Message:
    """One message of tensor parallelism, over `group_size` neighbouring ranks.

    `collective` is `all-reduce`, `all-gather` or `reduce-scatter`; the payload is the longer of input and output.
    """

    collective: str
    group_size: int
    payload_bytes: int


@dataclass(frozen=True)
class MicroBatchCosts:
    """What one rank's micro-batch costs.

    Attributes:
        activation_bytes: held when the forward pass reaches the output projection.
        loss_bytes: the most that the output projection holds beside them: a chunk of logits, and the gradients that the
            loss computes in the forward pass.
        temporary_bytes: the most that the backward pass holds beyond both.
        payload_bytes: of tensor parallelism's messages, by (group size, collective).
        segments: the parameters of the model and their uses, from the embedding to the output.
        parameter_sizes, trained_sizes: the elements of this rank's shards.
    """

    activation_bytes: int
    loss_bytes: int
    temporary_bytes: int
    payload_bytes: dict[tuple[int, str], int]
    segments: tuple[Segment, ...]
    parameter_sizes: tuple[int, ...]
    trained_sizes: tuple[int, ...]


def measure_micro_batch(
    config: RunConfig,
    spec: DecoderSpec,
    tp_size: int,
    activation_checkpointing: ActivationCheckpointing,
    dtype: torch.dtype,
) -> MicroBatchCosts:
    """Runs one micro-batch of the run `config` on the base `spec`, as rank 0 of `tp_size` tensor-parallel ranks.

    Raises:
        UserError: the model, or its sequences, cannot be split over `tp_size` ranks.
    """
    messages: list[Message] = []
    tp = imagined_ranks(tp_size, messages, sequence_parallel=config.parallel.sequence_parallel)
    check_sequence_length(config.data.sequence_length, tp)
    with torch.device("meta"), default_dtype(dtype):
        model = training_method(config).build(spec, tp, activation_checkpointing)
    sizes = tuple(parameter.numel() for parameter in model.parameters())
    trained = tuple(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    representatives = shorten(model)
    every_chunk = model.output.chunks
    # The chunks of the loss cost the same: a few show the most that is held. (Their messages are a few bytes a token.)
    model.output.chunks = lambda count: islice(every_chunk(count), 3)  # type: ignore[assignment, method-assign]
    with FakeTensorMode():
        _move_to_cpu(model)
        shape = config.schedule.micro_batch_size, config.data.sequence_length
        tokens = torch.zeros(shape, dtype=torch.long)
        document_ids = torch.zeros(shape, dtype=torch.long) if config.data.document_mask else None
        run = _Run(model, messages)
        run.step(tokens, tokens, tokens, document_ids)
    times = Counter(representatives)
    payload: Counter[tuple[int, str]] = Counter()
    for message, place in zip(messages, run.message_places, strict=True):
        payload[message.group_size, message.collective] += message.payload_bytes * (
            1 if place is None else times[place]
        )
    more = sum((times[layer] - 1) * held for layer, held in run.held_by_layer.items())
    segments = run.segments()
    return MicroBatchCosts(
        activation_bytes=run.activation_bytes + more,
        loss_bytes=run.loss_bytes,
        temporary_bytes=run.temporary_bytes,
        payload_bytes=dict(payload),
        segments=(segments[0], *(segments[1 + layer] for layer in representatives), segments[-1]),
        parameter_sizes=sizes,
        trained_sizes=trained,
    )


def shorten(model: Decoder) -> list[int]:
    """Leaves in `model` one layer of each kind. Returns, for each layer that there was, the index of its kind's.

    Layers cost the same if they have the same parameters, of which the same train, above the same kinds of layers.
    """
    kept: dict[object, nn.Module] = {}
    below: frozenset[object] = frozenset()
    representatives = []
    for layer in model.layers:
        parameters = tuple((name, each.shape, each.requires_grad) for name, each in layer.named_parameters())
        kind = (layer.collaborative, parameters)
        kept.setdefault((kind, below), layer)
        representatives.append(list(kept).index((kind, below)))
        below |= {kind}
    model.layers = nn.ModuleList(kept.values())
    return representatives


def _move_to_cpu(model: nn.Module) -> None:
    """Replaces each parameter, tied ones once, by an empty one on the CPU; `Module.to_empty` would lose attributes."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                made[parameter].__dict__.update(parameter.__dict__)
            setattr(module, name, made[parameter])


class _Run:
    """One micro-batch through a model, with what it holds, sends and uses noted by layer."""

    def __init__(self, model: Decoder, messages: list[Message]) -> None:
        self.model = model
        self.messages = messages
        self.message_places: list[int | None] = []
        self.held_by_layer: Counter[int] = Counter()
        self.forward_calls: Counter[int] = Counter()
        self.backward_uses: Counter[nn.Parameter] = Counter()
        self.activation_bytes = self.loss_bytes = self.temporary_bytes = 0
        self._live = LiveMemory(*model.parameters())
        self._place: int | None = None
        self._held_before = 0
        self._in_forward = True

    def step(self, *batch: Tensor | None) -> None:
        """Forward and backward pass."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                # As ZeRO does once it has reduced a gradient; what it then holds is counted apart.
                parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        forward_peak = 0

        def before_loss(*_: object) -> None:
            nonlocal forward_peak
            forward_peak, self.activation_bytes = self._live.peak, self._live.now
            self._live.restart_peak()

        self.model.output.register_forward_pre_hook(before_loss)
        for place, module in (
            (None, self.model.embedding),
            *enumerate(self.model.layers),
            (None, self.model.final_norm),
        ):
            self._follow(module, place)
        for module in self.model.modules():
            module.register_forward_hook(self._note_uses)
        with self._live:
            losses = self.model(*batch)
            self.loss_bytes = self._live.peak - self.activation_bytes
            self._in_forward = False
            losses.total.backward()
        self._enter(None)
        held = self.activation_bytes + self.loss_bytes
        self.temporary_bytes = max(forward_peak, self._live.peak) - held

    def _follow(self, module: nn.Module, place: int | None) -> None:
        """Calls `_enter(place)` whenever the forward or the backward pass reaches `module`."""

        def after(_: nn.Module, inputs: object, outputs: object) -> None:
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._enter(place))

        module.register_forward_pre_hook(lambda *_: self._enter(place))
        module.register_forward_hook(after)

    def _enter(self, place: int | None) -> None:
        self.message_places += [self._place] * (len(self.messages) - len(self.message_places))
        if self._in_forward:
            if self._place is not None:
                self.held_by_layer[self._place] += self._live.now - self._held_before
            if place is not None:
                self.forward_calls[place] += 1
            self._held_before = self._live.now
        self._place = place

    def _note_uses(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """A module runs in the backward pass where one of its results has a gradient."""
        if self._in_forward and any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(outputs)):
            self.backward_uses.update(module.parameters(recurse=False))

    def segments(self) -> list[Segment]:
        """Of the embedding, each layer that ran, and the final norm with the output."""
        layers = [list(layer.parameters()) for layer in self.model.layers]
        seen = {*self.model.embedding.parameters(), *(parameter for layer in layers for parameter in layer)}
        last = [parameter for parameter in self.model.parameters() if parameter not in seen]
        return [
            self._segment(list(self.model.embedding.parameters())),
            *(
                self._segment(
                    parameters, self.forward_calls[index], self.model.is_checkpointed(self.model.layers[index])
                )
                for index, parameters in enumerate(layers)
            ),
            self._segment(last),
        ]

    def _segment(
        self, parameters: Iterable[nn.Parameter], forward_calls: int = 1, checkpointed: bool = False
    ) -> Segment:
        uses = {parameter: self.backward_uses[parameter] for parameter in parameters}
        sizes = tuple(parameter.numel() for parameter in uses)
        return Segment(sizes, tuple(uses.values()), forward_calls, recomputed=checkpointed and any(uses.values()))


class LiveMemory(TorchDispatchMode):
    """While it is entered: the bytes of new storages that are alive (`now`), and the most that were (`peak`).

    A storage counts once, however many views it has, from the operation that makes it until its last tensor is gone.
    Older storages are not counted. Works on real, fake and meta tensors.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def restart_peak(self) -> None:
        """Lets `peak` begin again at `now`."""
        self.peak = self.now

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class RecordingGroup(dist.ProcessGroup):
    """A process group without other ranks: it notes what it is given, and sends nothing."""

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
    """Rank 0 of `tp_size` tensor-parallel ranks, without the others; what it would send is noted in `messages`."""
    if tp_size == 1:
        return TensorParallel()
    shared = [size for size in range(2, tp_size) if tp_size % size == 0]
    groups = tuple((size, RecordingGroup(size, messages)) for size in shared)
    return TensorParallel(0, tp_size, RecordingGroup(tp_size, messages), groups, sequence_parallel)
