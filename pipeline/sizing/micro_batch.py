"""The memory, messages and parameter uses of one micro-batch, forward and backward, on tensors without data.

The model that runs is the one that would train, on the meta device, with a CPU's fused attention: it keeps queries,
keys, values, results and one number per row, as on a GPU. So frozen parts, every method, Route's second path and
recomputed layers count for what they really cost.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.config.run import RunConfig
from pipeline.methods import build_model
from pipeline.model.attention import Documents
from pipeline.model.decoder import ActivationCheckpointing, Decoder, is_layer_matrix
from pipeline.model.decoder_layer import RotaryEmbedding
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.sharding import (
    default_dtype,
    full_shape_of,
    named_trained_parameters,
    partition_of,
)
from pipeline.parallel.topology import TensorParallel


class ParameterUse(NamedTuple):
    """A parameter of one rank: the elements of its shard, and what a step does with it.

    `read_again`: by the backward pass. `recomputed`: it is frozen, in a layer that the backward pass runs again.
    `muon_size`: the elements of the whole matrix that Muon updates; 0 where it does not. `split`: over tensor-parallel
    ranks, some of which may hold the same shard.
    """

    size: int
    trained: bool
    read_again: bool
    recomputed: bool
    muon_size: int
    split: bool


@dataclass(frozen=True)
class MicroBatchCosts:
    """The costs of one rank's micro-batch.

    Attributes:
        activation_bytes: held when the forward pass reaches the output projection.
        loss_bytes: the most that the output projection adds to them: a chunk of logits, and the gradients that the loss
            computes in the forward pass.
        temporary_bytes: the most that the backward pass holds in addition to both.
        payload_bytes: of tensor-parallel messages, by (group size, collective): the longer of input and output.
        parameter_bytes: of all shards together.
    """

    activation_bytes: int
    loss_bytes: int
    temporary_bytes: int
    payload_bytes: Counter[tuple[int, str]]
    parameters: tuple[ParameterUse, ...]
    parameter_bytes: int

    @property
    def trained(self) -> list[ParameterUse]:
        return [parameter for parameter in self.parameters if parameter.trained]


def measure_micro_batch(
    config: RunConfig,
    spec: DecoderSpec,
    tp_size: int,
    activation_checkpointing: ActivationCheckpointing,
    dtype: torch.dtype,
) -> MicroBatchCosts:
    """The costs of a micro-batch of `config` on the base `spec`, as rank 0 of `tp_size` tensor-parallel ranks runs it.

    Where the run rehearses, memory is that of a micro-batch with rehearsed sequences, and messages are the mean.

    Raises:
        UserError: the model, or its sequences, cannot be split over `tp_size` ranks.
    """
    payload_bytes: Counter[tuple[int, str]] = Counter()
    tp = imagined_ranks(tp_size, payload_bytes, sequence_parallel=config.parallel.sequence_parallel)
    with torch.device("meta"), default_dtype(dtype):
        model = build_model(config, spec, tp, activation_checkpointing)
    every_chunk = model.output.chunks

    def few_chunks(tokens: int, kl_tokens: int = 0) -> Iterator[slice]:
        """All chunks of one loss cost the same: a few show the peak. (Their messages are a few bytes a token.)"""
        chunks = list(every_chunk(tokens, kl_tokens))
        return iter(chunks[:3] + chunks[3:][-2:])

    model.output.chunks = few_chunks  # type: ignore[method-assign]
    rows = config.data.kl_fraction * config.schedule.micro_batch_size
    held, read_again, recomputed = _run(model, config, math.ceil(rows))
    sent = Counter(payload_bytes)
    share = math.ceil(rows) - rows
    if share and tp_size > 1:  # some micro-batches rehearse fewer sequences
        payload_bytes.clear()
        _run(model, config, 0)
        share /= math.ceil(rows)
        sent = Counter(
            {kind: round(share * payload_bytes[kind] + (1 - share) * sent[kind]) for kind in sent}
        )

    def use_of(name: str, weight: nn.Parameter) -> ParameterUse:
        by_muon = (
            config.schedule.optimizer == "muon"
            and weight.requires_grad
            and is_layer_matrix(name, weight)
        )
        whole = math.prod(full_shape_of(weight)) if by_muon else 0
        return ParameterUse(
            size=weight.numel(),
            trained=weight.requires_grad,
            read_again=weight in read_again,
            recomputed=weight in recomputed,
            muon_size=whole,
            split=tp_size > 1 and partition_of(weight).dim is not None,
        )

    uses = tuple(use_of(*named) for named in model.named_parameters())
    held_bytes = sum(weight.nbytes for weight in model.parameters())
    return MicroBatchCosts(**held, payload_bytes=sent, parameters=uses, parameter_bytes=held_bytes)


def _run(
    model: Decoder, config: RunConfig, kl_sequences: int
) -> tuple[dict[str, int], set[nn.Parameter], set[nn.Parameter]]:
    """Runs a micro-batch of which `kl_sequences` sequences are rehearsed.

    Returns the bytes that it holds; the parameters of modules whose outputs have a gradient; and the frozen ones of
    layers that run again for it.
    """
    shape = config.schedule.micro_batch_size, config.data.sequence_length
    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    ends = torch.zeros(shape[0] + 1, dtype=torch.int32, device="meta")
    documents = (
        Documents(torch.zeros_like(tokens), ends, (1,) * shape[0])
        if config.data.document_mask
        else None
    )
    live = LiveMemory(*model.parameters())
    forward_peak = activations = 0
    read_again: set[nn.Parameter] = set()
    recomputed: set[nn.Parameter] = set()

    def before_loss(*_: object) -> None:
        nonlocal forward_peak, activations
        forward_peak, activations = live.peak, live.now
        live.peak = live.now

    def after(module: nn.Module, _: object, outputs: object) -> None:
        if any(
            isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tree_leaves(outputs)
        ):
            read_again.update(module.parameters(recurse=False))
            if module in again:
                recomputed.update(
                    weight for weight in module.parameters() if not weight.requires_grad
                )

    again = {layer for layer in model.layers if model.is_checkpointed(layer)}
    with ExitStack() as hooks:
        hooks.enter_context(model.output.register_forward_pre_hook(before_loss))
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(after))
            if isinstance(module, Decoder):  # its table of frequencies counts in every micro-batch
                module.rotary = RotaryEmbedding()
        for _, parameter in named_trained_parameters(model):
            # ZeRO frees a gradient once it is reduced; what it then holds is counted separately.
            free = parameter.register_post_accumulate_grad_hook(
                lambda parameter: setattr(parameter, "grad", None)
            )
            hooks.enter_context(free)
        with live:
            losses = model(tokens, tokens, tokens, documents, kl_sequences, kl_sequences)
            loss = live.peak - activations
            losses.total.backward()
    temporary = max(forward_peak, live.peak) - activations - loss
    held = {"activation_bytes": activations, "loss_bytes": loss, "temporary_bytes": temporary}
    return held, read_again, recomputed


# --- Memory of tensors without data -----------------------------------------------------------------------------------

_sizes_of_results: dict[object, tuple[Any, ...] | None] = {}


class KnownSizes(TorchDispatchMode):
    """While entered, a new meta tensor that an equal call made before is made again from its sizes.

    torch derives the sizes of most results on the meta device in Python, which takes longer than all the rest.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: to keep the compiler out of every call would take a third of the time."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        key = operation, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items()))
        sizes = _sizes_of_results.get(key)
        if sizes is not None:
            shape, stride, dtype = sizes
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = operation(*args, **kwargs)
        if key not in _sizes_of_results:
            _sizes_of_results[key] = (
                _sizes(result) if _is_new_meta_tensor(result, (args, kwargs)) else None
            )
        return result


def _key(value: Any) -> object:
    """What the sizes of a result depend on. The type belongs to it, because 1 and 1.0 are equal."""
    if isinstance(value, Tensor):
        return value.device, *_sizes(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_new_meta_tensor(result: Any, given: Any) -> bool:
    """Whether `result` is one tensor with a storage of its own, as large as its elements."""
    if not isinstance(result, Tensor) or not result.is_meta:
        return False
    storage = result.untyped_storage()
    tensors = (tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor))
    return storage.nbytes() == result.nbytes and all(
        tensor.untyped_storage()._cdata != storage._cdata for tensor in tensors
    )


class LiveMemory(KnownSizes):
    """Counts, while entered, the bytes of new storages that are alive (`now`), and their peak.

    A storage counts once, however many views it has, from the operation that creates it until its last tensor is freed.
    The storages of the tensors `known` do not count. Works on real, fake and meta tensors.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


# --- Ranks that do not exist ------------------------------------------------------------------------------------------


class RecordingGroup(dist.ProcessGroup):
    """A process group without other ranks: it adds up its messages in `payload_bytes` and sends nothing."""

    def __init__(self, size: int, payload_bytes: Counter[tuple[int, str]]) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]  # the stub only has another constructor
        self._payload_bytes = payload_bytes

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> None:  # type: ignore[override]
        self._record("all-reduce", *tensors)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> None:  # type: ignore[override]
        self._record("all-gather", output)

    def reduce_scatter_single(self, own: Tensor, given: Tensor, options: Any = None) -> None:  # type: ignore[override]
        self._record("reduce-scatter", given)

    def _record(self, collective: str, *tensors: Tensor) -> None:
        self._payload_bytes[self.size(), collective] += sum(tensor.nbytes for tensor in tensors)


def imagined_ranks(
    tp_size: int, payload_bytes: Counter[tuple[int, str]], *, sequence_parallel: bool = False
) -> TensorParallel:
    """Rank 0 of `tp_size` tensor-parallel ranks, without the others; its messages are counted in `payload_bytes`."""
    if tp_size == 1:
        return TensorParallel()
    shared = [size for size in range(2, tp_size) if tp_size % size == 0]
    groups = tuple((size, RecordingGroup(size, payload_bytes)) for size in shared)
    return TensorParallel(
        0, tp_size, RecordingGroup(tp_size, payload_bytes), groups, sequence_parallel
    )
