"""The decoder on two streams. Without a plan it is the base model; with one, the base widened by SCALE."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.model.attention import Attend, Documents, attention_kernel
from pipeline.model.decoder_layer import (
    Context,
    DecoderLayer,
    RotaryEmbedding,
    RotaryTable,
    widened_norm,
)
from pipeline.model.mixture import MixtureFeedForward, balance_loss, recorded_loads
from pipeline.model.output import HiddenStates, Losses, OutputProjection
from pipeline.model.spec import DecoderSpec, LayerKind, RotarySpec, check_base_fits
from pipeline.parallel.collectives import enter_region
from pipeline.parallel.linear import LowRankAdapter
from pipeline.parallel.sharding import full_shape_of
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.gate import Gate, choose_path, deepest_gate_layer
from pipeline.scale.plan import ExpansionPlan
from pipeline.scale.widened_embedding import WidenedEmbedding
from pipeline.scale.widened_linear import Streams

ActivationCheckpointing = Literal["none", "collaborative", "all"]
"""Which layers the backward pass recomputes."""
LogitsPath = Literal["model", "preserved", "base"]
"""What to run: the whole model; the preserved path, with every W12 masked; or the base alone, without its expansion.

The last two also mask adapters and added layers."""

Inputs = tuple[Tensor, Tensor | None, Documents | None]
"""Tokens and positions, each [B, S], and where documents lie."""
Contexts = dict[LayerKind, Context]
"""What the layers of each kind share in a pass."""
REFERENCE = "reference."
"""How the names of parameters of the frozen copy of the base begin."""


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Whether the parameter of that name is a linear map within a layer, or those of all experts, and no router."""
    shape = full_shape_of(parameter)
    return (
        name.startswith("layers.")
        and ".router." not in name
        and len(shape) > 1
        and min(shape[-2:]) > 1
    )


class Decoder(nn.Module):
    """A decoder-only language model; its parameters are named in docs/architecture.md.

    Attributes:
        gate: decides per token, on the exact base stream, whether the model may differ from its base. It is fitted
            after training and set for inference in one process only: training, and with it tensor parallelism,
            sequence parallelism and ZeRO, never has one.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        plan: ExpansionPlan | None = None,
        *,
        added_layers: frozenset[int] = frozenset(),
        tp: TensorParallel = SINGLE,
    ) -> None:
        """`added_layers` are the indices of the layers that the base does not have.

        Raises LayoutError if the base's heads or FFN cannot be split over `tp.size` ranks.
        """
        super().__init__()
        check_base_fits(spec, tp.size)
        self.spec = spec
        self.plan = plan
        self.added_layers = added_layers
        self.tp = tp
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.gate: Gate | None = None
        # First, so that a weight which `output` shares with it has its name from here.
        self.register_module("reference", None)
        self.reference: Decoder | None
        hidden_size, hidden_up = (
            spec.widths.hidden_size,
            plan.expansion.hidden_size if plan else None,
        )
        self.rotary = RotaryEmbedding()
        self.embedding = WidenedEmbedding(
            spec.vocab_size, hidden_size, hidden_up, new_rows=spec.new_rows, tp=tp
        )
        self.layers = nn.ModuleList(
            DecoderLayer(spec, plan, layer, added=layer in added_layers, tp=tp)
            for layer in range(spec.num_layers)
        )
        ffns = (layer.ffn for layer in self.layers)
        self.mixtures = [ffn.base for ffn in ffns if isinstance(ffn, MixtureFeedForward)]
        self.final_norm = widened_norm(spec, plan, tp)
        threshold = plan.router_threshold if plan else 0.0
        self.output = OutputProjection(
            spec.vocab_size,
            hidden_size,
            hidden_up,
            new_rows=spec.new_rows,
            threshold=threshold,
            softcap=spec.output_softcap,
            tp=tp,
        )
        if spec.tie_word_embeddings:
            self.output.base = self.embedding.base.weight

    @property
    def keeps_base(self) -> bool:
        """Whether the base is kept unchanged next to what was added, so that `path="base"` runs it."""
        adapted = any(isinstance(module, LowRankAdapter) for module in self.modules())
        return self.plan is not None or adapted or bool(self.added_layers)

    def add_reference(self) -> None:
        """Adds a frozen copy of the base, uninitialised: what rehearsal needs where the base itself trains."""
        self.reference = Decoder(self.spec, tp=self.tp).requires_grad_(False)
        self.reference.output.new_rows = None  # the base never gives a new token
        self.output.reference = self.reference.output.base

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compiles every layer, each as one graph; layers of one kind share it.

        Compiled and plain layers round differently. The base's path and the widened one are compiled alike, so that
        the base stays exact where it was.
        """
        # A kind of layer has a graph for each path that it runs, with and without gradients.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for layer in self.layers:
            layer.compile(backend=backend, fullgraph=True)
        if self.reference is not None:
            self.reference.compile_layers(backend)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        kl_rows: int = 0,
        reference_rows: int = 0,
    ) -> Losses:
        """The losses of `targets` (−100 where nothing is predicted); see `Losses`.

        All tensors are [B, S]. Attention stays within the `documents`; `positions` default to 0, 1, ….
        The first `kl_rows` sequences are rehearsed. `reference_rows`, at least as many, is how many the base itself
        runs on; under ZeRO-3 it must be equal on all ranks.
        """
        with recorded_loads(self.mixtures) as loads:
            hidden = self.hidden_states(tokens, positions, documents, reference_rows=reference_rows)
        losses: Losses = self.output(hidden, targets.reshape(-1), kl_rows * tokens.shape[1])
        losses = losses.of_shape(targets.shape)
        if (
            loads
            and self.spec.mixture is not None
            and self.spec.mixture.balance_coefficient is not None
        ):
            balance = (
                self.spec.mixture.balance_coefficient * tokens.shape[1] * balance_loss(loads).sum()
            )
            losses = losses._replace(total=losses.total + balance)
        return losses

    @torch.no_grad()
    def logits(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        *,
        path: LogitsPath = "model",
    ) -> Tensor:
        """This rank's columns of the logits: [B, S, V / tp_size] in fp32."""
        hidden = self.hidden_states(tokens, positions, documents, path=path)
        return self.output.logits(hidden).view(*tokens.shape, -1)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        *,
        path: LogitsPath = "model",
        reference_rows: int = 0,
    ) -> HiddenStates:
        """The normalised hidden states that the output projection reads, one row for each of the B·S tokens.

        `reference` are those of the base alone, of the first `reference_rows` sequences.
        """
        streams = self._embedded(tokens)
        contexts = self._contexts(tokens, positions, documents, streams[0].dtype)
        if path == "model" and self.gate is not None:
            return self._gated_states(self.gate, tokens, streams, contexts, documents)
        if path == "base" and self.tp.size <= 2:
            streams = (streams[0], None)
        # Over three or more ranks, the order of a sum depends on an element's position in the message. There the
        # expansion stream runs along, without effect on the base stream, so that the base's results are bit-identical.
        masked = path != "model"
        routed = self.plan is not None and self.plan.routed and not masked
        preserved: Streams | None = None
        reference: Tensor | None = None
        rehearsed: Inputs = (tokens, positions, documents)
        if reference_rows:
            rehearsed = _first_rows(reference_rows, *rehearsed)
        runs_along = reference_rows > 0 and self.reference is None and not routed
        rehearsed_contexts = (
            self._contexts(*rehearsed, streams[0].dtype) if runs_along else contexts
        )
        for layer in self.layers:
            # All paths run layer by layer, so that ZeRO-3 gathers each layer once for them.
            if routed and layer.collaborative:
                preserved = self._run(layer, preserved or streams, contexts, masked=True)
            if runs_along and layer.collaborative:
                with torch.no_grad():
                    x = streams[0][:reference_rows].detach() if reference is None else reference
                    reference, _ = self._run(layer, (x, None), rehearsed_contexts, masked=True)
            streams = self._run(layer, streams, contexts, masked)
        final = self.final_norm(*streams)
        hidden = self._whole_rows(
            *final, *(() if preserved is None else self.final_norm(*preserved))
        )
        if reference_rows:
            hidden = replace(hidden, reference=self._reference_states(hidden, reference, rehearsed))
        return HiddenStates(hidden.x) if path == "base" else hidden

    def _gated_states(
        self,
        gate: Gate,
        tokens: Tensor,
        streams: Streams,
        contexts: Contexts,
        documents: Documents | None,
    ) -> HiddenStates:
        """The hidden states of each token's path; a closed token's is without W12, and has an x_up of zeros.

        All paths are one up to the first layer with W12, and the gate of Preserve and Adapt decides before it. From
        there on Route runs both paths, and a closed token takes the preserved one. Adapt runs one.
        """
        if self.plan is None or gate.layer > deepest_gate_layer(self.plan) or self.tp.size > 1:
            raise ValueError(
                "a gate needs the exact base stream of a widened model, whole on one rank"
            )
        ids, closed = documents.ids if documents else None, None
        paths: list[Streams] = [streams]
        masks: list[bool | Tensor] = [False]
        for index, layer in enumerate(self.layers):
            if index == gate.layer:
                closed = self.gate_closes(gate, paths[0][0], tokens, ids).unsqueeze(-1)
            if index == self.plan.l_fp:
                masks = [True, False]
                if not self.plan.routed:
                    assert closed is not None, "the gate's layer is checked above"
                    masks = [closed]
                paths = paths * len(masks)
            paths = [
                self._run(layer, path, contexts, mask)
                for path, mask in zip(paths, masks, strict=True)
            ]
        if closed is None:
            closed = self.gate_closes(gate, paths[0][0], tokens, ids).unsqueeze(-1)
        finals = [self.final_norm(*path) for path in paths]
        hidden = self._whole_rows(*choose_path(closed, finals[0], finals[-1]))
        return replace(hidden, closed=closed.flatten())

    def gate_closes(
        self, gate: Gate, x: Tensor, tokens: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        """For which tokens the gate is closed, by the base stream x: [B, S, D]: bool [B, S]. New pieces are open."""
        return ~gate.is_open(x, document_ids) & (tokens < self.output.base_columns)

    @torch.no_grad()
    def base_stream(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        *,
        layer: int,
    ) -> Tensor:
        """The base's residual stream before `layer`, or after the last if there are as many: [B, S, D]."""
        x, _ = self._embedded(tokens)
        contexts = self._contexts(tokens, positions, documents, x.dtype)
        for below in self.layers[:layer]:
            x, _ = self._run(below, (x, None), contexts, masked=True)
        return x

    @torch.no_grad()
    def _reference_states(self, hidden: HiddenStates, x: Tensor | None, inputs: Inputs) -> Tensor:
        """The base's own last hidden states of `inputs`: [R·S, D]. x: [R, S, D], its stream where that ran along."""
        if self.reference is not None:
            return self.reference.hidden_states(*inputs).x
        if x is not None:
            return self._whole_rows(self.final_norm(x, None)[0]).x
        # Preserve's base stream, and that of Route's preserved path, are the base's.
        same = hidden.x if hidden.preserved_x is None else hidden.preserved_x
        return same[: inputs[0].numel()].detach()

    def _whole_rows(self, *streams: Tensor | None) -> HiddenStates:
        """streams: [B, S (/ tp_size), ...] -> the same for all positions, one token a row."""
        x, *others = enter_region(self.tp, *streams)
        return HiddenStates(
            x.flatten(0, 1), *(None if other is None else other.flatten(0, 1) for other in others)
        )

    def _embedded(self, tokens: Tensor) -> Streams:
        x, x_up = self.embedding(tokens)
        if self.spec.embedding_scale == 1.0:
            return x, x_up
        # transformers rounds the factor to the type of the weights.
        scale = torch.tensor(self.spec.embedding_scale, dtype=x.dtype, device="cpu").item()
        return x * scale, None if x_up is None else x_up * scale

    def _contexts(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        documents: Documents | None,
        dtype: torch.dtype,
    ) -> Contexts:
        length = tokens.shape[1]
        if positions is None:
            positions = torch.arange(length, device=tokens.device)

        def rotary(spec: RotarySpec | None) -> RotaryTable | None:
            return None if spec is None else self.rotary.table(spec, positions, documents, dtype)

        def kernel(window: int | None) -> Attend:
            head_dim, scale, softcap = (
                self.spec.head_dim,
                self.spec.attention_scale,
                self.spec.attention_softcap,
            )
            within = (
                Documents.whole_rows(tokens)
                if documents is None and (window or softcap)
                else documents
            )
            return attention_kernel(
                within, tokens.device, dtype, head_dim, window=window, scale=scale, softcap=softcap
            )

        windows = {
            kind: kind.window if kind.window and kind.window < length else None
            for kind in self.spec.layers
        }
        kernels = {window: kernel(window) for window in set(windows.values())}
        tables = {spec: rotary(spec) for spec in {kind.rotary for kind in windows}}
        return {
            kind: Context(tables[kind.rotary], kernels[window]) for kind, window in windows.items()
        }

    def _run(
        self, layer: nn.Module, streams: Streams, contexts: Contexts, masked: bool | Tensor
    ) -> Streams:
        result: Streams
        context = contexts[layer.kind]  # type: ignore[index]  # a DecoderLayer
        if torch.is_grad_enabled() and self.is_checkpointed(layer):
            result = checkpoint(layer, *streams, context, masked, use_reentrant=False)
        else:
            result = layer(*streams, context, masked)
        return result

    def is_checkpointed(self, layer: nn.Module) -> bool:
        """Whether the backward pass recomputes `layer`, one of `layers`."""
        if self.activation_checkpointing == "collaborative":
            return bool(layer.collaborative)
        return self.activation_checkpointing == "all"


def _first_rows(
    rows: int, tokens: Tensor, positions: Tensor | None, documents: Documents | None
) -> Inputs:
    return (
        tokens[:rows],
        None if positions is None else positions[:rows],
        None if documents is None else documents.first_rows(rows),
    )
