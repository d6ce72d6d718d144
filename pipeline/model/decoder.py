"""The decoder on two streams. Without a plan it is the base model; with one, the base widened by
SCALE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from pipeline.model.attention import Attend, Documents, attention_kernel
from pipeline.model.causal_decoder import CausalDecoder, LogitsPath
from pipeline.model.chunked_loss import Losses
from pipeline.model.decoder_layer import Context, DecoderLayer, apply_norm, widened_norm
from pipeline.model.gated_paths import gated_states
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.mixture import Load, Mixture, MixtureFeedForward, balance_loss, recorded_loads
from pipeline.model.open_weights import OwnInputRows, add_open_weights
from pipeline.model.output import OutputProjection
from pipeline.model.paths import (
    LayerPass,
    TokenBatch,
    run_base,
    run_preserved,
    run_routed,
    run_widened,
)
from pipeline.model.recomputation import run_recomputed
from pipeline.model.reference import states_with_reference
from pipeline.model.rotary import RotaryEmbedding, RotaryTable
from pipeline.model.spec import (
    DecoderSpec,
    LayerKind,
    RotarySpec,
    check_base_fits,
    check_experts_fit,
)
from pipeline.open_tokens import ALL_OPEN, NONE_OPEN, OpenTokens
from pipeline.parallel.collectives import enter_region
from pipeline.parallel.parameters import full_shape_of
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.plan import ExpansionPlan, added_widths
from pipeline.scale.widened_embedding import WidenedEmbedding
from pipeline.scale.widened_linear import Streams

REFERENCE = "reference."
"""How the names of parameters of the frozen copy of the base begin."""


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Whether the parameter of that name is a linear map within a layer, or those of all experts,
    and no router."""
    shape = full_shape_of(parameter)
    return (
        name.startswith("layers.")
        and ".router." not in name
        and len(shape) > 1
        and min(shape[-2:]) > 1
    )


class Decoder(CausalDecoder):
    """A decoder-only language model; its parameters are named in docs/architecture.md."""

    def __init__(
        self,
        spec: DecoderSpec,
        plan: ExpansionPlan | None = None,
        *,
        added_layers: frozenset[int] = frozenset(),
        tp: TensorParallel = SINGLE,
    ) -> None:
        """`added_layers` are the indices of the layers that the base does not have.

        Raises LayoutError if the base's heads or FFN cannot be split over `tp.size` ranks, or its
        experts be shared by those of `tp.expert_parallel`.
        """
        super().__init__(spec, plan, tp)
        check_base_fits(spec, tp.size)
        check_experts_fit(spec, tp.expert_parallel.size)
        self.added_layers = added_layers
        self._run_recomputed = run_recomputed
        self._compiled = False
        # First, so that a weight which `output` shares with it has its name from here.
        self.register_module("reference", None)
        self.reference: Decoder | None
        hidden_size = spec.widths.hidden_size
        added = added_widths(plan)
        hidden_up = None if added is None else added.hidden_size
        self.rotary = RotaryEmbedding()
        self.embedding = WidenedEmbedding(
            spec.vocab_size, hidden_size, hidden_up, new_tokens=spec.new_tokens, tp=tp
        )
        self.layers = nn.ModuleList(
            DecoderLayer(spec, plan, layer, added=layer in added_layers, tp=tp)
            for layer in range(spec.num_layers)
        )
        self.mixtures: list[Mixture] = []
        for layer in self.layers:
            if isinstance(layer.ffn, MixtureFeedForward):
                self.mixtures.append(layer.ffn.base)
        self.final_norm = widened_norm(spec, plan, tp)
        self.is_routed = plan is not None and plan.routed
        own_row_of = self.own_row_of()
        self.output = OutputProjection(
            spec.vocab_size,
            hidden_size,
            hidden_up,
            new_tokens=spec.new_tokens,
            own_row_of=own_row_of,
            threshold=0.0 if plan is None else plan.router_threshold,
            softcap=spec.output_softcap,
            tp=tp,
        )
        if spec.tie_word_embeddings:
            self.output.base = self.embedding.base.weight
        if plan is not None:
            add_open_weights(self.layers, self.final_norm, plan, tp)
        if own_row_of is not None:
            self.own_input = OwnInputRows(own_row_of, hidden_size, tp=tp)

    @property
    def keeps_base(self) -> bool:
        """Whether the base is kept unchanged next to what was added, so that `path="base"` runs
        it."""
        return self.plan is not None or bool(self.added_layers)

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compiles every layer, each as one graph; layers of one kind share it.

        Compiled and plain layers round differently. The base's path and the widened one are
        compiled alike, so that the base stays exact where it was.
        """
        # A kind of layer has a graph for each path that it runs, with and without gradients.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self._compiled = True
        for layer in self.layers:
            layer.compile(backend=backend, fullgraph=True)
        if self.kept_results != "nothing":
            # The compiler must see the recomputation to keep parts of it.
            self._run_recomputed = torch.compile(run_recomputed, backend=backend, fullgraph=True)
        if self.reference is not None:
            self.reference.compile_layers(backend)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        kl_sequences: int = 0,
        reference_sequences: int = 0,
    ) -> Losses:
        batch = TokenBatch(tokens, positions, documents)
        if not self.mixtures:
            return self._losses(batch, targets, kl_sequences, reference_sequences)
        with recorded_loads(self.mixtures) as loads:
            losses = self._losses(batch, targets, kl_sequences, reference_sequences)
        return self._with_balance_loss(losses, loads, tokens.shape[1])

    def _losses(
        self, batch: TokenBatch, targets: Tensor, kl_sequences: int, reference_sequences: int
    ) -> Losses:
        """The losses of `forward`, without that which balances experts."""
        if reference_sequences:
            # Some rank has self-generated text: the base runs beside the model on all of them.
            hidden = states_with_reference(self, batch, reference_sequences)
        else:
            hidden = self.hidden_states(*batch)
        # All B·S tokens as rows: the loss is computed in chunks of them.
        kl_rows = kl_sequences * targets.shape[1]
        losses: Losses = self.output(hidden, targets.flatten(), kl_rows)
        return losses.reshaped(targets.shape)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        *,
        path: LogitsPath = "model",
    ) -> HiddenStates:
        """The normalised hidden states that the output projection reads, one row for each of the
        B·S tokens."""
        batch = TokenBatch(tokens, positions, documents)
        streams = self.embedded(tokens)
        layers = self.layer_pass(batch, streams[0].dtype)
        if path == "base":
            return self._base_states(layers, streams)
        if path == "preserved":
            return self.final_states(run_preserved(layers, streams), open_tokens=NONE_OPEN)
        if self.gate is not None:
            return gated_states(self, self.gate, layers, streams, batch)
        if self.is_routed:
            return self.final_states(*run_routed(layers, streams, streams))
        layers = self.with_own_input(layers, tokens)
        return self.final_states(run_widened(layers, streams))

    def final_states(
        self,
        streams: Streams,
        preserved: Streams | None = None,
        *,
        open_tokens: OpenTokens = ALL_OPEN,
    ) -> HiddenStates:
        """The final norm of the streams, and of Route's preserved path; then all positions' rows on
        every rank."""
        x, x_up = apply_norm(self.final_norm, streams, open_tokens)
        preserved_x: Tensor | None = None
        preserved_x_up: Tensor | None = None
        if preserved is not None:
            preserved_x, preserved_x_up = self.final_norm(*preserved)
        # One message for all streams: an all-gather under sequence parallelism, and the sum of
        # their gradients.
        x, x_up, preserved_x, preserved_x_up = enter_region(
            self.tp, x, x_up, preserved_x, preserved_x_up
        )
        hidden = HiddenStates(x, x_up, preserved_x, preserved_x_up, open_tokens=open_tokens)
        return hidden.one_token_a_row()

    def with_own_input(self, layers: LayerPass, tokens: Tensor) -> LayerPass:
        """The pass with what open tokens add to x, if the model has own input rows."""
        if self.own_input is None:
            return layers
        return replace(layers, own_input=self.own_input_of(tokens))

    def _base_states(self, layers: LayerPass, streams: Streams) -> HiddenStates:
        """The base's own hidden states, to the bit those of the base model."""
        if self.tp.size <= 2:
            return self.final_states((run_base(layers, streams[0]), None), open_tokens=NONE_OPEN)
        # Over three or more ranks, the order of a sum depends on an element's position in the
        # message. There the expansion stream runs along, without effect on the base stream, so that
        # the base's results are bit-identical.
        preserved = self.final_states(run_preserved(layers, streams), open_tokens=NONE_OPEN)
        return HiddenStates(preserved.x, open_tokens=NONE_OPEN)

    def _with_balance_loss(self, losses: Losses, loads: Sequence[Load], length: int) -> Losses:
        """Adds the loss that balances the experts, where the routers of a mixture train: that of a
        token, times S."""
        mixture = self.spec.mixture
        if not loads or mixture is None or mixture.balance_coefficient is None:
            return losses
        balance = mixture.balance_coefficient * length * balance_loss(loads).sum()
        return losses._replace(total=losses.total + balance)

    def embedded(self, tokens: Tensor) -> Streams:
        """The streams that enter the first layer."""
        x, x_up = self.embedding(tokens)
        if self.spec.embedding_scale == 1.0:
            return x, x_up
        # transformers rounds the factor to the type of the weights.
        scale = torch.tensor(self.spec.embedding_scale, dtype=x.dtype, device="cpu").item()
        if x_up is not None:
            x_up = x_up * scale
        return x * scale, x_up

    def layer_pass(self, batch: TokenBatch, dtype: torch.dtype) -> LayerPass:
        """All layers, with the rotary tables and attention kernels of the batch in `dtype`."""
        tokens, positions, documents = batch
        length = tokens.shape[1]
        if positions is None:
            positions = torch.arange(length, device=tokens.device)
        # Layers of several kinds share a table or a kernel, whose mask may be large: each is made
        # once.
        tables: dict[RotarySpec | None, RotaryTable | None] = {None: None}
        kernels: dict[int | None, Attend] = {}
        table_dtype = torch.float32 if self.spec.rounds_once else dtype
        contexts: dict[LayerKind, Context] = {}
        for kind in dict.fromkeys(self.spec.layers):
            window = kind.window
            if window is not None and window >= length:
                # A window as long as the row is plain causal attention, for which there are faster
                # kernels.
                window = None
            if window not in kernels:
                kernels[window] = self._attention_kernel(window, tokens, documents, dtype)
            if kind.rotary is not None and kind.rotary not in tables:
                tables[kind.rotary] = self.rotary.table(
                    kind.rotary, positions, documents, table_dtype
                )
            contexts[kind] = Context(tables[kind.rotary], kernels[window])
        layers = cast(list[DecoderLayer], list(self.layers))
        recomputed = partial(self._run_recomputed, kept=self.kept_results)
        return LayerPass(layers, contexts, self.is_recomputed, recomputed)

    def _attention_kernel(
        self, window: int | None, tokens: Tensor, documents: Documents | None, dtype: torch.dtype
    ) -> Attend:
        """The attention that all layers with this window share: causal, and within documents."""
        softcap = self.spec.attention_softcap
        if documents is None and (window is not None or softcap is not None):
            # The kernels with a window or a softcap mask by document: take each row as one.
            documents = Documents.whole_rows(tokens)
        return attention_kernel(
            documents,
            tokens.device,
            dtype,
            self.spec.head_dim,
            window=window,
            scale=self.spec.attention_scale,
            softcap=softcap,
            compiled=self._compiled,
        )

    def recomputed_layers(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            if self.is_recomputed(layer):
                yield layer

    def is_recomputed(self, layer: nn.Module) -> bool:
        """Whether the backward pass recomputes `layer`, one of `layers`."""
        if self.activation_checkpointing == "collaborative":
            return bool(layer.collaborative)
        return self.activation_checkpointing == "all"

    @torch.no_grad()
    def base_stream(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        *,
        layer: int,
    ) -> Tensor:
        """The base's residual stream before `layer`, or after the last if there are as many:
        [B, S, D]."""
        x, _ = self.embedded(tokens)
        layers = self.layer_pass(TokenBatch(tokens, positions, documents), x.dtype)
        return run_base(layers.part(None, layer), x)

    def add_reference(self) -> None:
        """Adds a frozen copy of the base, uninitialised: what KL(base || model) needs where the
        base itself trains."""
        self.reference = Decoder(self.spec, tp=self.tp).requires_grad_(False)
        self.reference.output.new_rows = None  # the base never gives a new token
        self.output.reference = self.reference.output.base
