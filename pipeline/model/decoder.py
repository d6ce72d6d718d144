"""The decoder on two streams. Without a plan it is the base model; with one, the base widened by SCALE."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.model.layers import Context, DecoderLayer, RotaryEmbedding, widened_norm
from pipeline.model.output import HiddenStates, Losses, OutputProjection
from pipeline.model.spec import DecoderSpec, check_base_fits
from pipeline.parallel.collectives import enter_region
from pipeline.parallel.layers import LowRankAdapter
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.layers import WidenedEmbedding
from pipeline.scale.plan import ExpansionPlan

LogitsPath = Literal["model", "preserved", "base"]
"""What to run: the whole model; the preserved path, with every W12 masked; or the base alone, without its expansion.

Adapters and added layers are masked on both of the latter."""


class Decoder(nn.Module):
    """A decoder-only language model; its parameters are named in docs/architecture.md."""

    def __init__(
        self,
        spec: DecoderSpec,
        plan: ExpansionPlan | None = None,
        *,
        added_layers: frozenset[int] = frozenset(),
        tp: TensorParallel = SINGLE,
        activation_checkpointing: Literal["none", "collaborative", "all"] = "none",
    ) -> None:
        """`added_layers` are those of the layers that are none of the base's."""
        super().__init__()
        check_base_fits(spec.widths, tp.size)
        self.spec = spec
        self.plan = plan
        self.added_layers = added_layers
        self.tp = tp
        self.activation_checkpointing = activation_checkpointing
        hidden_size, hidden_up = spec.widths.hidden_size, plan.expansion.hidden_size if plan else None
        self.rotary = RotaryEmbedding(spec.rotary, spec.head_dim)
        self.embedding = WidenedEmbedding(spec.vocab_size, hidden_size, hidden_up, tp=tp)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, plan, layer, added=layer in added_layers, tp=tp) for layer in range(spec.num_layers)
        )
        self.final_norm = widened_norm(spec, plan, tp)
        threshold = plan.router_threshold if plan else 0.0
        self.output = OutputProjection(spec.vocab_size, hidden_size, hidden_up, threshold=threshold, tp=tp)
        if spec.tie_word_embeddings:
            self.output.base = self.embedding.base.weight

    @property
    def keeps_base(self) -> bool:
        """Whether something stands beside the base (an expansion, adapters, added layers), so that `path="base"` runs
        the base as it was; where the base itself trains, nothing does."""
        adapted = any(isinstance(module, LowRankAdapter) for module in self.modules())
        return self.plan is not None or adapted or bool(self.added_layers)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Losses:
        """How well `targets` (−100 where nothing is predicted) are predicted.

        All inputs are [B, S]; attention stays within runs of equal `document_ids`, and `positions` count from 0 where
        not given.
        """
        hidden = self.hidden_states(tokens, positions, document_ids)
        losses: Losses = self.output(hidden, targets.reshape(-1))
        return losses.of_shape(targets.shape)

    @torch.no_grad()
    def logits(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        path: LogitsPath = "model",
    ) -> Tensor:
        """This rank's columns of the logits: [B, S, V / tp_size] in fp32."""
        hidden = self.hidden_states(tokens, positions, document_ids, path=path)
        return self.output.logits(hidden).view(*tokens.shape, -1)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        path: LogitsPath = "model",
    ) -> HiddenStates:
        """The normalised hidden states that the output projection reads, a row a token."""
        x, x_up = self.embedding(tokens)
        context = self._context(tokens, positions, document_ids, x.dtype)
        if path == "base" and self.tp.size <= 2:
            x_up = None
        # Three ranks and more add up in an order that depends on where in a message an element stands. So that the base
        # alone gives the same bits there, its stream travels beside the other's, from which it takes nothing.
        masked = path != "model"
        routed = self.plan is not None and self.plan.routed and path == "model"
        common = self.plan.l_fp if self.plan is not None and routed else len(self.layers)
        for index in range(common):
            x, x_up = self._layer(index, x, x_up, context, masked)
        if not routed:
            hidden = self._whole_rows(*self.final_norm(x, x_up))
            return HiddenStates(hidden.x) if path == "base" else hidden
        # Both paths go through a layer in turn, so that ZeRO-3 gathers it once for the two.
        preserved_x, preserved_x_up = x, x_up
        for index in range(common, len(self.layers)):
            preserved_x, preserved_x_up = self._layer(index, preserved_x, preserved_x_up, context, True)
            x, x_up = self._layer(index, x, x_up, context, False)
        return self._whole_rows(*self.final_norm(x, x_up), *self.final_norm(preserved_x, preserved_x_up))

    def _whole_rows(self, *streams: Tensor | None) -> HiddenStates:
        """The streams as the output projection, which is split over the vocabulary, takes them."""
        x, *others = enter_region(self.tp, *streams)
        return HiddenStates(x.flatten(0, 1), *(None if other is None else other.flatten(0, 1) for other in others))

    def _context(
        self, tokens: Tensor, positions: Tensor | None, document_ids: Tensor | None, dtype: torch.dtype
    ) -> Context:
        length = tokens.shape[1]
        if positions is None:
            positions = torch.arange(length, device=tokens.device)
        rotary = self.rotary.table(positions, dtype)
        return Context(rotary, None if document_ids is None else document_mask(document_ids, dtype))

    def _layer(
        self, index: int, x: Tensor, x_up: Tensor | None, context: Context, masked: bool
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.layers[index]
        streams: tuple[Tensor, Tensor | None]
        if torch.is_grad_enabled() and self._is_checkpointed(index):
            streams = checkpoint(layer, x, x_up, context, masked, use_reentrant=False)
        else:
            streams = layer(x, x_up, context, masked)
        return streams

    def _is_checkpointed(self, index: int) -> bool:
        if self.activation_checkpointing == "collaborative":
            return self.plan is None or index >= self.plan.l_fp
        return self.activation_checkpointing == "all"


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """document_ids: [B, S] -> [B, 1, S, S]: 0 where a query may see a key, -inf where the key is later or of another
    document. Additive, in the type of the queries: attention would otherwise make its own copy in every layer."""
    length = document_ids.shape[1]
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    hidden = (same & causal).logical_not_().unsqueeze(1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
