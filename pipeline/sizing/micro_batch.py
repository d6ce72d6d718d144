"""One micro-batch, forward and backward, on tensors without data: what it holds, what it sends, what it fetches.

The model that runs is the one that would train, on the kernels that a CPU would choose: its fused attention keeps
queries, keys, values, results and one number a row, as a GPU's does. So frozen parts, every method, Route's second path
and recomputed layers count as what they are.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

# --- The bytes that a computation holds, watched as its tensors come and go -----------------------------------------


class LiveMemory(TorchDispatchMode):
    """While it is entered: how many bytes of new storages live (`now`), and at most did (`peak`).

    A storage counts once, whatever views there are of it, from the operation that makes it until its last tensor is
    gone. Storages from before are not counted. Works alike on real, fake and meta tensors.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def restart_peak(self) -> None:
        """Forgets what lived at most so far."""
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


# --- How ZeRO-3 gathers parameters around the modules that use them: DeepSpeed's rules, followed over one micro-batch
# DeepSpeed gathers a module's parameters before it runs, and some of those that will run next (prefetch), as long as
# not too many are there already. Afterwards it lets go of those that are not used again soon (reuse distance).


@dataclass(frozen=True)
class Fetch:
    """A module about to run, forward or backward: its parameters, by index, and whether it lets them go afterwards."""

    parameters: tuple[int, ...]
    releases: bool


@dataclass(frozen=True)
class GatherSettings:
    """The keys of `zero_optimization` that govern gathering, in elements, with DeepSpeed's defaults."""

    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000

    @classmethod
    def of(cls, zero: dict[str, Any]) -> GatherSettings:
        """What the section `zero_optimization` of a DeepSpeed JSON says."""
        return cls(**{name: int(zero[f"stage3_{name}"]) for name in cls.__annotations__ if f"stage3_{name}" in zero})


@dataclass(frozen=True)
class Gathering:
    """What a micro-batch gathers in all, and the most that is there at once: the gathered working set. In elements."""

    gathered: int
    most_at_once: int


def simulate_gathering(fetches: Sequence[Fetch], sizes: Sequence[int], settings: GatherSettings) -> Gathering:
    """Follows `fetches` over parameters of `sizes`; parameters at the threshold or below are always there."""
    simulation = _Simulation(fetches, sizes, settings)
    for step in range(len(fetches)):
        simulation.run(step)
    return Gathering(simulation.gathered, simulation.most_at_once)


@dataclass
class _Simulation:
    fetches: Sequence[Fetch]
    sizes: Sequence[int]
    settings: GatherSettings
    available: set[int] = field(default_factory=set)
    elements: int = 0
    gathered: int = 0
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self._persistent = {
            index for index, size in enumerate(self.sizes) if size <= self.settings.param_persistence_threshold
        }
        self._used = [sum(self.sizes[index] for index in fetch.parameters) for fetch in self.fetches]
        uses = ((index, step) for step, fetch in enumerate(self.fetches) for index in dict.fromkeys(fetch.parameters))
        self._queue = deque(uses)
        self._fetched_for: dict[int, int] = {}

    def run(self, step: int) -> None:
        """One module: gather, prefetch, compute, release."""
        fetch = self.fetches[step]
        self._gather(fetch.parameters)
        waiting = {index for index in fetch.parameters if self._fetched_for.get(index, -1) < step}
        while waiting:
            index, used_at = self._queue.popleft()
            self._fetched_for[index] = used_at
            waiting.discard(index)
        self._prefetch()
        self.most_at_once = max(self.most_at_once, self.elements)
        if fetch.releases:
            self._release(fetch, step)

    def _gather(self, parameters: Sequence[int]) -> None:
        missing = {index for index in parameters if index not in self.available and index not in self._persistent}
        self.available |= missing
        count = sum(self.sizes[index] for index in missing)
        self.elements += count
        self.gathered += count

    def _prefetch(self) -> None:
        room = min(self.settings.max_live_parameters - self.elements, self.settings.prefetch_bucket_size)
        chosen: list[int] = []
        count = 0
        while self._queue and count < room:
            index, used_at = self._queue.popleft()
            self._fetched_for[index] = max(self._fetched_for.get(index, -1), used_at)
            if index not in self.available and index not in self._persistent and index not in chosen:
                chosen.append(index)
                count += self.sizes[index]
        self._gather(chosen)

    def _release(self, fetch: Fetch, step: int) -> None:
        # Neither what a prefetch has counted on, nor what is used again within the reuse distance.
        leaving = {index for index in fetch.parameters if self._fetched_for.get(index, -1) <= step}
        distance = 0
        for later in range(step + 1, len(self.fetches)):
            if distance >= self.settings.max_reuse_distance or not leaving:
                break
            leaving.difference_update(self.fetches[later].parameters)
            distance += self._used[later]
        leaving &= self.available
        self.available -= leaving
        self.elements -= sum(self.sizes[index] for index in leaving)


# --- One micro-batch, forward and backward, on tensors without da ---


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
