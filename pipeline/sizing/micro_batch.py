"""The memory, messages and parameter uses of one micro-batch, on tensors without data.

The model that runs, forward and backward, is the one that would train, on the meta device, with a
CPU's fused attention: it keeps queries, keys, values, results and one number per row, as on a GPU.
So frozen parts, every method, Route's second path and recomputed layers count for what they really
cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeline.config.run import RunConfig
from pipeline.hosted.decoder import HostedDecoder
from pipeline.methods import build_model
from pipeline.model.attention import Documents
from pipeline.model.causal_decoder import ActivationCheckpointing, CausalDecoder
from pipeline.model.decoder import Decoder, is_layer_matrix
from pipeline.model.recomputation import KeptResults
from pipeline.model.rotary import RotaryEmbedding
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.sharding import (
    default_dtype,
    full_shape_of,
    named_trained_parameters,
    partition_of,
)
from pipeline.sizing.imagined_ranks import imagined_expert_ranks, imagined_ranks
from pipeline.sizing.live_memory import LiveMemory
from pipeline.sizing.meta_device import foreign_code_traced


class ParameterUse(NamedTuple):
    """A parameter of one rank, and what a step does with it.

    Attributes:
        size: elements of the rank's shard.
        trained: whether it trains.
        read_again: whether the backward pass reads it.
        recomputed: whether it is frozen, in a layer that the backward pass runs again.
        muon_size: elements of the whole matrix that Muon updates; 0 where it does not.
        split: whether tensor-parallel ranks share it, some of which may hold the same shard.
        kept_whole: whether ZeRO-3 leaves it on the rank, as the experts that ranks share.
    """

    size: int
    trained: bool
    read_again: bool
    recomputed: bool
    muon_size: int
    split: bool
    kept_whole: bool = False


@dataclass(frozen=True)
class MicroBatchCosts:
    """The costs of one rank's micro-batch.

    Attributes:
        activation_bytes: held when the forward pass reaches the output projection.
        loss_bytes: the most that the output projection adds: a chunk of logits, and the gradients
            that the loss computes in the forward pass.
        temporary_bytes: the most that the backward pass holds in addition to both.
        backward_bytes: the most that the backward pass holds in addition to `activation_bytes`.
        payload_bytes: of tensor-parallel messages, by (group size, collective): the longer of input
            and output.
        expert_payload_bytes: likewise of messages between the ranks that share experts.
        parameters: those of the rank.
        parameter_bytes: of all shards together.
    """

    activation_bytes: int
    loss_bytes: int
    temporary_bytes: int
    backward_bytes: int
    payload_bytes: Counter[tuple[int, str]]
    expert_payload_bytes: Counter[tuple[int, str]]
    parameters: tuple[ParameterUse, ...]
    parameter_bytes: int

    @property
    def trained(self) -> list[ParameterUse]:
        return [parameter for parameter in self.parameters if parameter.trained]

    @property
    def by_muon(self) -> list[ParameterUse]:
        return [parameter for parameter in self.parameters if parameter.muon_size]


def total_elements(parameters: Iterable[ParameterUse]) -> int:
    """The elements of a rank's shards of `parameters`."""
    return sum(parameter.size for parameter in parameters)


def measure_micro_batch(
    config: RunConfig,
    spec: DecoderSpec,
    tp_size: int,
    activation_checkpointing: ActivationCheckpointing,
    dtype: torch.dtype,
    kept_results: KeptResults = "nothing",
    expert_size: int = 1,
) -> MicroBatchCosts:
    """The costs of a micro-batch of a run.

    Where the run has self-generated text, memory is that of a micro-batch with such sequences, and
    messages are the mean over micro-batches.

    Args:
        config: the run.
        spec: its base.
        tp_size: tensor-parallel ranks, of which this is rank 0.
        activation_checkpointing: the layers that are recomputed.
        dtype: of the parameters.
        kept_results: what recomputed layers keep.
        expert_size: ranks that share experts, of which this is rank 0. Each gets as many rows for
            its experts as the others, unless the run pads them.

    Raises:
        UserError: the model, or its sequences, cannot be split over `tp_size` ranks.
        NotTracedError: transformers' code of a hosted base does not run without data.
    """
    payload_bytes: Counter[tuple[int, str]] = Counter()
    expert_payload_bytes: Counter[tuple[int, str]] = Counter()
    parallel = config.parallel
    tp = imagined_ranks(
        tp_size,
        payload_bytes,
        sequence_parallel=parallel.sequence_parallel,
        expert_parallel=imagined_expert_ranks(
            expert_size, expert_payload_bytes, padded=parallel.padded_experts
        ),
    )
    with torch.device("meta"), default_dtype(dtype):
        model = build_model(config, spec, tp, activation_checkpointing, kept_results)
    every_chunk = model.output.chunks

    def few_chunks(tokens: int, kl_tokens: int = 0) -> Iterator[slice]:
        """The first and the last chunks: all chunks of one loss cost the same.

        (The messages of those left out are a few bytes a token.)
        """
        chunks = list(every_chunk(tokens, kl_tokens))
        return iter(chunks[:3] + chunks[3:][-2:])

    model.output.chunks = few_chunks  # type: ignore[method-assign]

    kl_sequences = config.data.kl_fraction * config.schedule.micro_batch_size
    most_kl_sequences = math.ceil(kl_sequences)
    passed = _run(model, config, most_kl_sequences)
    sent = Counter(payload_bytes)
    sent_by_experts = Counter(expert_payload_bytes)
    if kl_sequences < most_kl_sequences and tp_size * expert_size > 1:
        # Some micro-batches have fewer KL sequences: the mean lies between most and none.
        payload_bytes.clear()
        expert_payload_bytes.clear()
        _run(model, config, 0)
        share = (most_kl_sequences - kl_sequences) / most_kl_sequences
        for mean, least in ((sent, payload_bytes), (sent_by_experts, expert_payload_bytes)):
            for kind, most in mean.items():
                mean[kind] = round(share * least[kind] + (1 - share) * most)

    uses = []
    for name, weight in model.named_parameters():
        uses.append(_use_of(name, weight, passed, tp_size, with_muon=_uses_muon(config)))
    return MicroBatchCosts(
        activation_bytes=passed.activation_bytes,
        loss_bytes=passed.loss_bytes,
        temporary_bytes=passed.temporary_bytes,
        backward_bytes=passed.backward_bytes,
        payload_bytes=sent,
        expert_payload_bytes=sent_by_experts,
        parameters=tuple(uses),
        parameter_bytes=sum(weight.nbytes for weight in model.parameters()),
    )


class _Pass(NamedTuple):
    """A forward and a backward pass: the bytes that it held, and the parameters that it read.

    Attributes:
        activation_bytes: see `MicroBatchCosts`.
        loss_bytes: see `MicroBatchCosts`.
        temporary_bytes: see `MicroBatchCosts`.
        backward_bytes: see `MicroBatchCosts`.
        read_again: the parameters of modules whose outputs have a gradient.
        recomputed: the frozen parameters of layers that ran again for the backward pass.
    """

    activation_bytes: int
    loss_bytes: int
    temporary_bytes: int
    backward_bytes: int
    read_again: set[nn.Parameter]
    recomputed: set[nn.Parameter]


def _uses_muon(config: RunConfig) -> bool:
    return config.schedule.optimizer == "muon"


def _use_of(
    name: str, weight: nn.Parameter, passed: _Pass, tp_size: int, *, with_muon: bool
) -> ParameterUse:
    """What a step does with one parameter."""
    muon_size = 0
    if with_muon and weight.requires_grad and is_layer_matrix(name, weight):
        muon_size = math.prod(full_shape_of(weight))
    return ParameterUse(
        size=weight.numel(),
        trained=weight.requires_grad,
        read_again=weight in passed.read_again,
        recomputed=weight in passed.recomputed,
        muon_size=muon_size,
        split=tp_size > 1 and partition_of(weight).dim is not None,
        kept_whole=partition_of(weight).expert_size > 1,
    )


def _run(model: CausalDecoder, config: RunConfig, kl_sequences: int) -> _Pass:
    """Runs a micro-batch of which `kl_sequences` sequences train by KL(base || model)."""
    rows = config.schedule.micro_batch_size
    tokens = torch.zeros(rows, config.data.sequence_length, dtype=torch.long, device="meta")
    documents = None
    if config.data.document_mask:
        ends = torch.zeros(rows + 1, dtype=torch.int32, device="meta")
        documents = Documents(torch.zeros_like(tokens), ends, (1,) * rows)

    live = LiveMemory(*model.parameters())
    forward_peak = 0
    activations = 0
    read_again: set[nn.Parameter] = set()
    recomputed: set[nn.Parameter] = set()
    checkpointed = set(model.recomputed_layers())
    # x_up passes through every layer of a hosted base, and trains: all of them run again. Outputs
    # of the base's own modules do not show it.
    always_runs_again = isinstance(model, HostedDecoder)

    def before_loss(*_: object) -> None:
        nonlocal forward_peak, activations
        forward_peak = live.peak
        activations = live.now
        live.peak = live.now

    def after(module: nn.Module, _: object, outputs: object) -> None:
        has_gradient = _has_gradient(outputs)
        if has_gradient:
            read_again.update(module.parameters(recurse=False))
        if module in checkpointed and (has_gradient or always_runs_again):
            for weight in module.parameters():
                if not weight.requires_grad:
                    recomputed.add(weight)

    with ExitStack() as hooks:
        hooks.enter_context(model.output.register_forward_pre_hook(before_loss))
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(after))
            if isinstance(module, Decoder):  # its table of frequencies counts in every micro-batch
                # A new one: an earlier run's would hold its tables already, and they would not
                # count.
                module.rotary = RotaryEmbedding()
        for _, parameter in named_trained_parameters(model):
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(_free_gradient))
        with foreign_code_traced(model.spec), live:
            losses = model(tokens, tokens, tokens, documents, kl_sequences, kl_sequences)
            loss = live.peak - activations
            live.peak = live.now
            losses.total.backward()
            backward = live.peak - activations
    return _Pass(
        activation_bytes=activations,
        loss_bytes=loss,
        temporary_bytes=max(forward_peak - activations, loss, backward) - loss,
        backward_bytes=backward,
        read_again=read_again,
        recomputed=recomputed,
    )


def _has_gradient(outputs: object) -> bool:
    """Whether one of a module's outputs takes part in the backward pass."""
    return any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tree_leaves(outputs)
    )


def _free_gradient(parameter: Tensor) -> None:
    """ZeRO frees a gradient once it is reduced; what it then holds is counted separately."""
    parameter.grad = None
