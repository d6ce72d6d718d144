"""The memory, messages and parameter uses of one micro-batch, forward and backward, on tensors without data.

The model that runs is the one that would train, on the meta device, with a CPU's fused attention: it keeps queries,
keys, values, results and one number per row, as on a GPU. So frozen parts, every method, Route's second path and
recomputed layers count for what they really cost. Layers that cost the same run once and are multiplied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeline.config.run import RunConfig
from pipeline.methods import build_model
from pipeline.methods.method import ActivationCheckpointing
from pipeline.model.attention import Documents
from pipeline.model.decoder import Decoder
from pipeline.model.layers import RotaryEmbedding
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.sharding import default_dtype
from pipeline.parallel.topology import TensorParallel
from pipeline.sizing.gathering import Segment
from pipeline.sizing.meta_tensors import LiveMemory

Message = tuple[int, str, int]
"""A tensor-parallel message: the group size, the collective (`all-reduce`, `all-gather` or `reduce-scatter`), and the
payload in bytes, the longer of input and output."""


@dataclass(frozen=True)
class MicroBatchCosts:
    """The costs of one rank's micro-batch.

    Attributes:
        activation_bytes: held when the forward pass reaches the output projection.
        loss_bytes: the most that the output projection adds to them: a chunk of logits, and the gradients that the loss
            computes in the forward pass.
        temporary_bytes: the most that the backward pass holds in addition to both.
        payload_bytes: of tensor-parallel messages, by (group size, collective).
        segments: the parameters of the model and their uses, from the embedding to the output.
        parameter_sizes, trained_sizes: the elements of this rank's shard of each parameter.
        parameter_bytes: of all shards together.
    """

    activation_bytes: int
    loss_bytes: int
    temporary_bytes: int
    payload_bytes: dict[tuple[int, str], int]
    segments: tuple[Segment, ...]
    parameter_sizes: tuple[int, ...]
    trained_sizes: tuple[int, ...]
    parameter_bytes: int


class MicroBatch:
    """A micro-batch of the run `config` on the base `spec`, as rank 0 of `tp_size` tensor-parallel ranks runs it.

    Its model is built once, in `dtype` and without data.
    """

    def __init__(self, config: RunConfig, spec: DecoderSpec, tp_size: int, dtype: torch.dtype) -> None:
        """Raises UserError if the model, or its sequences, cannot be split over `tp_size` ranks."""
        self.config = config
        self.spec = spec
        self.dtype = dtype
        self._messages: list[Message] = []
        tp = imagined_ranks(tp_size, self._messages, sequence_parallel=config.parallel.sequence_parallel)
        with torch.device("meta"), default_dtype(dtype):
            self._model = build_model(config, spec, tp)
        self._sizes = tuple(parameter.numel() for parameter in self._model.parameters())
        self._trained = tuple(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        self._bytes = sum(parameter.nbytes for parameter in self._model.parameters())
        self._representatives = shorten(self._model)
        every_chunk = self._model.output.chunks

        def few_chunks(tokens: int, kl_tokens: int = 0) -> Iterator[slice]:
            """All chunks of one loss cost the same: a few show the peak. (Their messages are a few bytes a token.)"""
            chunks = list(every_chunk(tokens, kl_tokens))
            return iter(chunks[:3] + chunks[3:][-2:])

        self._model.output.chunks = few_chunks  # type: ignore[method-assign]

    def costs(self, activation_checkpointing: ActivationCheckpointing) -> MicroBatchCosts:
        """Runs the micro-batch.

        Where the run rehearses, memory is that of a micro-batch with rehearsed sequences, and messages are the mean.
        """
        self._model.activation_checkpointing = activation_checkpointing
        plain = self._measure(kl_rows=0)
        rows = self.config.data.kl_fraction * self.config.schedule.micro_batch_size
        kl_rows = math.ceil(rows)
        if kl_rows == 0:
            return plain
        rehearsed = self._measure(kl_rows=kl_rows)
        # Layers that ran once are multiplied, but the base's stream exists once: it counts here, with its last states.
        elements = kl_rows * self.config.data.sequence_length * self.spec.widths.hidden_size
        payload = {
            key: round(sent + rows / kl_rows * (rehearsed.payload_bytes[key] - sent))
            for key, sent in plain.payload_bytes.items()
        }
        return replace(
            plain,
            activation_bytes=plain.activation_bytes + 2 * elements * self.dtype.itemsize,
            loss_bytes=max(plain.loss_bytes, rehearsed.loss_bytes),
            temporary_bytes=max(plain.temporary_bytes, rehearsed.temporary_bytes),
            payload_bytes=payload,
        )

    def _measure(self, *, kl_rows: int) -> MicroBatchCosts:
        """The costs of a micro-batch of which `kl_rows` sequences are rehearsed."""
        config, representatives = self.config, self._representatives
        shape = config.schedule.micro_batch_size, config.data.sequence_length
        tokens = torch.zeros(shape, dtype=torch.long, device="meta")
        ends = torch.zeros(shape[0] + 1, dtype=torch.int32, device="meta")
        documents = Documents(torch.zeros_like(tokens), ends, (1,) * shape[0]) if config.data.document_mask else None
        self._messages.clear()
        for module in self._model.modules():
            if isinstance(module, Decoder):  # its table of frequencies counts in every micro-batch
                module.rotary = RotaryEmbedding()
        run = _Run(self._model, self._messages)
        run.step(tokens, tokens, tokens, documents, kl_rows, kl_rows)
        times = Counter(representatives)
        payload: Counter[tuple[int, str]] = Counter()
        for (group_size, collective, length), layer in zip(self._messages, run.message_layers, strict=True):
            payload[group_size, collective] += length * (1 if layer is None else times[layer])
        left_out = sum((times[layer] - 1) * held for layer, held in run.held_by_layer.items())
        segments = run.segments()
        return MicroBatchCosts(
            activation_bytes=run.activation_bytes + left_out,
            loss_bytes=run.loss_bytes,
            temporary_bytes=run.temporary_bytes,
            payload_bytes=dict(payload),
            segments=(segments[0], *(segments[1 + layer] for layer in representatives), segments[-1]),
            parameter_sizes=self._sizes,
            trained_sizes=self._trained,
            parameter_bytes=self._bytes,
        )


def shorten(model: Decoder) -> list[int]:
    """Keeps one layer of each kind in `model`. Returns, for each original layer, the index of the layer of its kind.

    Layers cost the same if they are of one `LayerKind`, have the same parameters, the same of them train, and the same
    kinds of layers are below them.
    """
    kept: dict[object, nn.Module] = {}
    below: frozenset[object] = frozenset()
    representatives = []
    for layer in model.layers:
        parameters = tuple((name, weight.shape, weight.requires_grad) for name, weight in layer.named_parameters())
        kind = (layer.collaborative, layer.kind, parameters)
        kept.setdefault((kind, below), layer)
        representatives.append(list(kept).index((kind, below)))
        below |= {kind}
    model.layers = nn.ModuleList(kept.values())
    return representatives


class _Run:
    """Runs one micro-batch through a model and records by layer what it holds, sends and uses."""

    def __init__(self, model: Decoder, messages: list[Message]) -> None:
        self.model = model
        self.messages = messages
        self.message_layers: list[int | None] = []
        self.held_by_layer: Counter[int] = Counter()
        self.forward_calls: Counter[int] = Counter()
        self.backward_uses: Counter[nn.Parameter] = Counter()
        self.activation_bytes = self.loss_bytes = self.temporary_bytes = 0
        self._live = LiveMemory(*model.parameters())
        self._layer: int | None = None
        self._held_before = 0
        self._in_forward = True
        self._hooks = ExitStack()

    def step(self, *batch: Tensor | Documents | int | None) -> None:
        """Forward and backward pass."""
        with self._hooks:
            self._step(*batch)

    def _step(self, *batch: Tensor | Documents | int | None) -> None:
        hook = self._hooks.enter_context
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                # ZeRO frees a gradient once it is reduced; what it then holds is counted separately.
                hook(parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None)))
        forward_peak = 0

        def before_loss(*_: object) -> None:
            nonlocal forward_peak
            forward_peak, self.activation_bytes = self._live.peak, self._live.now
            self._live.restart_peak()

        hook(self.model.output.register_forward_pre_hook(before_loss))
        self._follow(self.model.embedding, None)
        for index, layer in enumerate(self.model.layers):
            self._follow(layer, index)
        self._follow(self.model.final_norm, None)
        for module in self.model.modules():
            hook(module.register_forward_hook(self._note_uses))
        with self._live:
            losses = self.model(*batch)
            self.loss_bytes = self._live.peak - self.activation_bytes
            self._in_forward = False
            losses.total.backward()
        self._enter(None)
        held = self.activation_bytes + self.loss_bytes
        self.temporary_bytes = max(forward_peak, self._live.peak) - held

    def _follow(self, module: nn.Module, layer: int | None) -> None:
        """Calls `_enter(layer)` whenever the forward or the backward pass reaches `module`."""

        def after(_: nn.Module, inputs: object, outputs: object) -> None:
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._enter(layer))

        self._hooks.enter_context(module.register_forward_pre_hook(lambda *_: self._enter(layer)))
        self._hooks.enter_context(module.register_forward_hook(after))

    def _enter(self, layer: int | None) -> None:
        """Assigns messages and memory since the last call to the layer that was entered then; None is outside all."""
        self.message_layers += [self._layer] * (len(self.messages) - len(self.message_layers))
        if self._in_forward:
            if self._layer is not None:
                self.held_by_layer[self._layer] += self._live.now - self._held_before
            if layer is not None:
                self.forward_calls[layer] += 1
            self._held_before = self._live.now
        self._layer = layer

    def _note_uses(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """Counts a use in the backward pass if one of the module's outputs requires a gradient."""
        if self._in_forward and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(outputs)):
            self.backward_uses.update(module.parameters(recurse=False))

    def segments(self) -> list[Segment]:
        """The embedding, each layer that ran, and the final norm with the output projection.

        A frozen copy of the base is left out: it is used in the forward pass only, which is not the peak.
        """
        embedding = list(self.model.embedding.parameters())
        copied = [] if self.model.reference is None else self.model.reference.parameters()
        segments, seen = [self._segment(embedding)], {*embedding, *copied}
        for index, layer in enumerate(self.model.layers):
            parameters = list(layer.parameters())
            segments.append(self._segment(parameters, self.forward_calls[index], self.model.is_checkpointed(layer)))
            seen.update(parameters)
        return [*segments, self._segment(weight for weight in self.model.parameters() if weight not in seen)]

    def _segment(
        self, parameters: Iterable[nn.Parameter], forward_calls: int = 1, checkpointed: bool = False
    ) -> Segment:
        uses = {parameter: self.backward_uses[parameter] for parameter in parameters}
        sizes = tuple(parameter.numel() for parameter in uses)
        return Segment(sizes, tuple(uses.values()), forward_calls, recomputed=checkpointed and any(uses.values()))


class RecordingGroup(dist.ProcessGroup):
    """A process group without other ranks: it records messages and sends nothing."""

    def __init__(self, size: int, messages: list[Message]) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # the stub only has another constructor
        self._messages = messages

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        """Records the message."""
        self._record("all-reduce", *tensors)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        """Records the message."""
        self._record("all-gather", output)

    def reduce_scatter_single(self, own: Tensor, given: Tensor, options: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        """Records the message."""
        self._record("reduce-scatter", given)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _record(self, collective: str, *tensors: Tensor) -> None:
        self._messages.append((self.size(), collective, sum(tensor.nbytes for tensor in tensors)))


def imagined_ranks(tp_size: int, messages: list[Message], *, sequence_parallel: bool = False) -> TensorParallel:
    """Rank 0 of `tp_size` tensor-parallel ranks, without the others; its messages are recorded in `messages`."""
    if tp_size == 1:
        return TensorParallel()
    shared = [size for size in range(2, tp_size) if tp_size % size == 0]
    groups = tuple((size, RecordingGroup(size, messages)) for size in shared)
    return TensorParallel(0, tp_size, RecordingGroup(tp_size, messages), groups, sequence_parallel)
