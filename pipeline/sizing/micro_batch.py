"""The memory, messages and parameter uses of one micro-batch, on tensors without data.

The model that would train runs forward and backward on the meta device. So every method, frozen
parts, Route's second path and recomputed layers count with what they cost. Attention runs as the
fused kernel of CPUs, which saves the same tensors as those of GPUs: queries, keys, values, results,
and one number for each row.
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
from pipeline.methods.build_model import build_model
from pipeline.model.attention import Documents
from pipeline.model.bases import kind_of
from pipeline.model.causal_decoder import ActivationCheckpointing, CausalDecoder
from pipeline.model.decoder import Decoder
from pipeline.model.recomputation import KeptResults
from pipeline.model.rotary import RotaryEmbedding
from pipeline.model.spec import DecoderSpec
from pipeline.optimizers.optimizer import Optimizer, moments_of, optimizer_named
from pipeline.parallel.parameters import (
    default_dtype,
    full_shape_of,
    named_trained_parameters,
    partition_of,
)
from pipeline.sizing.imagined_ranks import imagined_expert_ranks, imagined_ranks
from pipeline.sizing.live_memory import LiveMemory


class ParameterUse(NamedTuple):
    """A parameter of one rank, and its use in a step.

    Attributes:
        size: elements of the rank's shard.
        trained: whether it trains.
        read_again: whether the backward pass reads it.
        recomputed: whether it is frozen, in a layer that the backward pass runs again.
        moments: how many moments the optimizer stores of it; 0 where it does not train.
        matrix_size: elements of the whole matrix that its optimizer puts together, as Muon does, of
            a stack of experts one; 0 where it does not.
        split: whether it is sharded over tensor-parallel ranks. Some of these may hold the same
            shard, where there are fewer key/value heads than ranks.
        kept_whole: whether ZeRO-3 does not partition it: experts that ranks share.
    """

    size: int
    trained: bool
    read_again: bool
    recomputed: bool
    moments: int
    matrix_size: int
    split: bool
    kept_whole: bool = False


@dataclass(frozen=True)
class MicroBatchCosts:
    """The costs of one rank's micro-batch.

    Attributes:
        activation_bytes: memory of activations when the forward pass reaches the output projection.
        loss_bytes: peak memory that the output projection and the loss add to it: a chunk of
            logits, and the gradients that the loss computes in the forward pass.
        temporary_bytes: peak memory that the backward pass adds to both.
        backward_bytes: peak memory that the backward pass adds to `activation_bytes`.
        payload_bytes: lengths of tensor-parallel messages, by (group size, collective); of input
            and output the longer one counts.
        expert_payload_bytes: likewise of messages between ranks that share experts.
        parameters: the parameters of the rank.
        parameter_bytes: bytes of all of them.
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
        """The parameters that train."""
        return [parameter for parameter in self.parameters if parameter.trained]

    @property
    def in_matrices(self) -> list[ParameterUse]:
        """The parameters whose optimizer puts whole matrices together."""
        return [parameter for parameter in self.parameters if parameter.matrix_size]


def total_elements(parameters: Iterable[ParameterUse]) -> int:
    """The number of elements of a rank's shards of `parameters`."""
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

    In a run with samples that train by KL, memory is that of a micro-batch with the most such
    sequences, and messages are the mean over micro-batches.

    Args:
        config: the run.
        spec: its base.
        tp_size: tensor-parallel ranks, of which this is rank 0.
        activation_checkpointing: the layers that are recomputed.
        dtype: of the parameters.
        kept_results: what recomputed layers keep.
        expert_size: ranks that share experts, of which this is rank 0. Tokens are taken to be even
            over the experts, unless the run pads their buffers.

    Raises:
        UserError: the model, or its sequences, cannot be split over `tp_size` ranks.
        NotTracedError: the base's code does not run without data.
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
        """The first and the last chunks, to save time: all chunks of one loss cost the same.

        The messages of the others are not counted; they are a few bytes a token.
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
        # The number of KL sequences differs between micro-batches. Messages are linear in it: their
        # mean is interpolated between the most sequences and none.
        payload_bytes.clear()
        expert_payload_bytes.clear()
        _run(model, config, 0)
        share = (most_kl_sequences - kl_sequences) / most_kl_sequences
        for mean, least in ((sent, payload_bytes), (sent_by_experts, expert_payload_bytes)):
            for kind, most in mean.items():
                mean[kind] = round(share * least[kind] + (1 - share) * most)

    optimizer = optimizer_named(config.schedule.optimizer)
    uses = []
    for name, weight in model.named_parameters():
        uses.append(_use_of(name, weight, passed, tp_size, optimizer))
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
    """A forward and a backward pass: the memory that it took, and the parameters that it read.

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


def _use_of(
    name: str, weight: nn.Parameter, passed: _Pass, tp_size: int, optimizer: Optimizer
) -> ParameterUse:
    """The use of one parameter in a step."""
    moments = 0
    matrix_size = 0
    if weight.requires_grad:
        moments = len(moments_of(optimizer, name, weight))
        if optimizer.needs_shards and optimizer.updates(name, weight):
            matrix_size = math.prod(full_shape_of(weight)[-2:])
    return ParameterUse(
        size=weight.numel(),
        trained=weight.requires_grad,
        read_again=weight in passed.read_again,
        recomputed=weight in passed.recomputed,
        moments=moments,
        matrix_size=matrix_size,
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
    # x_up passes through every layer and has gradients, so that every layer runs again. It is not
    # among the outputs of modules of transformers, which have no gradient below W12.
    always_runs_again = not model.spec.is_native

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
            if isinstance(module, Decoder):
                # A new one, so that its tables of frequencies are made in this run, and count.
                module.rotary = RotaryEmbedding()
        for _, parameter in named_trained_parameters(model):
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(_free_gradient))
        with kind_of(model.spec).traced(model.spec), live:
            losses = model(tokens, tokens, tokens, documents, kl_sequences, kl_sequences)
            # `before_loss` has reset the peak: this one is of the output projection and the loss.
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
    for output in tree_leaves(outputs):
        if isinstance(output, Tensor) and output.requires_grad:
            return True
    return False


def _free_gradient(parameter: Tensor) -> None:
    """Frees a gradient, as ZeRO does once it is reduced. The memory of gradients and buckets is
    computed apart, in `sizing.memory`.
    """
    parameter.grad = None
