"""What training, scoring, checkpoints and exports use of a model, whoever computes its base.

`pipeline.model.decoder.Decoder` computes the base itself. A base of another kind
(`pipeline.model.base_kind`) has a decoder of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from pipeline.model.attention import Documents
from pipeline.model.chunked_loss import Losses
from pipeline.model.gated_paths import TokenGate
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.open_weights import OwnInput, OwnInputRows, OwnRowOfToken
from pipeline.model.output import OutputProjection
from pipeline.model.paths import TokenBatch
from pipeline.model.recomputation import KeptResults
from pipeline.model.spec import DecoderSpec
from pipeline.open_tokens import OpenTokens
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan

ActivationCheckpointing = Literal["none", "collaborative", "all"]
"""Which layers the backward pass recomputes."""
LogitsPath = Literal["model", "preserved", "base"]
"""What to run: the whole model; the preserved path, with every W12 masked; or the base alone,
without its expansion.

The last two also mask adapters and added layers."""


class CausalDecoder(nn.Module, ABC):
    """A decoder-only language model, a base alone or with what a method added to it.

    Attributes:
        spec: the base's architecture.
        plan: what SCALE or LoRA adds to the base; None for other models.
        tp: this rank's place in its tensor-parallel group.
        activation_checkpointing: which layers the backward pass recomputes.
        kept_results: what those layers keep all the same.
        gate: decides per token, on the exact base stream, whether the model may differ from its
            base. It is fitted after training and set for inference in one process only: training,
            and with it tensor parallelism, sequence parallelism and ZeRO, never has one.
        frozen_in_stage: the names of parameters that the method trains, and this stage of the run
            does not.
        equals_base: whether no trained weight has changed since the preservation check, so that the
            model's own hidden states are those of the base. The base's pass for KL has fewer rows
            than the model's: a mixture's products round otherwise there, and an optimizer that
            normalises makes whole steps of such a gradient.
        output: the output projection, which computes logits and losses from hidden states.
        layers: the layers, of which open weights begin at one.
        own_input: the differences of the embedding's rows for open tokens; None without own rows.
    """

    def __init__(self, spec: DecoderSpec, plan: ExpansionPlan | None, tp: TensorParallel) -> None:
        super().__init__()
        self.spec = spec
        self.plan = plan
        self.tp = tp
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.kept_results: KeptResults = "nothing"
        self.gate: TokenGate | None = None
        self.frozen_in_stage: tuple[str, ...] = ()
        self.equals_base = False
        self.output: OutputProjection
        self.layers: nn.ModuleList
        self.own_input: OwnInputRows | None = None

    def own_row_of(self) -> OwnRowOfToken | None:
        """Which own row each token has; None if the plan has none."""
        if self.plan is None or self.plan.own is None or self.plan.own.tokens is None:
            return None
        return OwnRowOfToken(self.plan.own.tokens, self.spec.vocab_size, self.spec.added_tokens)

    def own_input_of(self, tokens: Tensor) -> OwnInput | None:
        """What open tokens add to x; None for a model without own input rows."""
        if self.own_input is None:
            return None
        assert self.plan is not None and self.plan.own is not None, "they come with own rows"
        return OwnInput(self.layers[self.plan.own.first_layer], self.own_input(tokens))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.output.base.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the base's weights, and of the streams."""
        return self.output.base.dtype

    @property
    @abstractmethod
    def keeps_base(self) -> bool:
        """Whether the base is kept unchanged next to what was added, so that `path="base"` runs
        it."""

    @abstractmethod
    def recomputed_layers(self) -> Iterator[nn.Module]:
        """The layers that the backward pass computes again, with the base's part of each."""

    def modules_gathered_whole(self) -> Iterator[nn.Module]:
        """The modules whose parameters ZeRO-3 gathers all at once, those of their parts too.

        Code that is not ours may read the weights of a part without calling the part.
        """
        yield from ()

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        kl_sequences: int = 0,
        reference_sequences: int = 0,
    ) -> Losses:
        """The losses of `targets` (−100 where nothing is predicted); see `Losses`.

        All tensors are [B, S]. Attention stays within the `documents`; `positions` default to 0, 1,
        …. The loss of the first `kl_sequences` sequences is KL(base || model): they are
        self-generated text, or old text with `replay_loss: kl`. `reference_sequences`, at least as
        many, is how many the base itself runs on; under ZeRO-3 it must be equal on all ranks.
        """

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def compile_layers(self, backend: str = "inductor") -> None:
        """Compiles every layer, each as one graph."""

    @abstractmethod
    def add_reference(self) -> None:
        """Adds a frozen copy of the base, uninitialised: what KL(base || model) needs where the
        base itself trains."""

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

    def gate_opens(self, gate: TokenGate, x: Tensor, batch: TokenBatch) -> OpenTokens:
        """The tokens that the gate opens, by the base stream x: [B, S, D]. New tokens are open, and
        ids that old text never has."""
        document_ids = None if batch.documents is None else batch.documents.ids
        is_open = gate.is_open(x, document_ids) | gate.opens_id(batch.tokens)
        closed = ~is_open & (batch.tokens < self.output.base_columns)
        return OpenTokens(closed=closed.unsqueeze(-1))
