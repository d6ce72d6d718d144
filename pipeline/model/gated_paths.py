"""The paths of a model with a gate, which closes tokens: they keep the base's result.

They are for inference in one process: training never has a gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from pipeline.model.decoder_layer import apply_norm
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.paths import LayerPass, TokenBatch, run_routed, run_widened
from pipeline.open_tokens import NONE_OPEN, OpenTokens, choose_path
from pipeline.scale.widened_linear import Streams

if TYPE_CHECKING:  # it imports this module
    from pipeline.model.decoder import Decoder


class TokenGate(Protocol):
    """Decides per token whether the model may differ from its base
    (`pipeline.gating.gate.FittedGate`)."""

    @property
    def layer(self) -> int:
        """The index of the layer before which the gate reads the base stream; the number of layers:
        after the last."""

    def is_open(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x: [B, S, D], the base stream before `layer`; document_ids: [B, S] -> which tokens are
        open by their score: bool [B, S]."""

    def opens_id(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S] -> which of them are open by their id alone: bool [B, S]."""


Decision = Callable[[Tensor], OpenTokens]
"""x: [B, S, D], the base stream before the gate's layer -> the tokens that the gate opens."""


def run_gated(
    layers: LayerPass,
    streams: Streams,
    gate_layer: int,
    first_changed: int,
    decide: Decision,
) -> tuple[Streams, OpenTokens]:
    """Preserve, Adapt and LoRA with a gate: what was added to the base stream is skipped for closed
    tokens. It begins at layer `first_changed`.

    Where the gate reads at or below that layer, one pass serves both kinds of tokens. Otherwise the
    layers between run twice. Returns the streams and the open tokens.
    """
    if gate_layer > first_changed:
        streams, open_tokens = _run_until_gate(layers, streams, gate_layer, first_changed, decide)
        rest = layers.part(gate_layer, None)
    else:
        streams = run_widened(layers.part(None, gate_layer), streams)
        open_tokens = decide(streams[0])
        streams = run_widened(layers.part(gate_layer, first_changed), streams)
        rest = layers.part(first_changed, None)
    for layer in rest.layers:
        streams = layers.run(layer, streams, open_tokens=open_tokens)
    return streams, open_tokens


def _run_until_gate(
    layers: LayerPass,
    streams: Streams,
    gate_layer: int,
    first_changed: int,
    decide: Decision,
) -> tuple[Streams, OpenTokens]:
    """The layers below a gate that reads above layer `first_changed`: two passes, joined there.

    The base alone gives the gate's features, and the x of closed tokens. The whole model, as if all
    tokens were open, as in training, gives both streams of open tokens. So below the gate closed
    tokens attend to the base's keys alone, and open ones to those of open tokens alone.

    Closed tokens go on with an x_up of zeros. The open pass has one too, but beside an x that
    training may have made many times as large as the base's, by which norms of kind `base` divide:
    too large an x_up would be read by all open tokens behind it (docs/adr/0033).
    """
    streams = run_widened(layers.part(None, first_changed), streams)
    base_x = streams[0]
    for layer in layers.part(first_changed, gate_layer).layers:
        # Layer by layer, so that ZeRO-3 would gather each once for both.
        base_x, _ = layers.run(layer, (base_x, None), open_tokens=NONE_OPEN)
        streams = layers.run(layer, streams)
    open_tokens = decide(base_x)
    x, x_up = choose_path(open_tokens, (base_x, None), streams)
    return (x, x_up), open_tokens


def run_routed_with_gate(
    layers: LayerPass, streams: Streams, gate_layer: int, decide: Decision
) -> tuple[Streams, Streams, OpenTokens]:
    """Route with a gate, which reads the preserved path: there the base stream is exact in every
    layer.

    Returns the adapted path, the preserved path, and the open tokens, which are to take the adapted
    one.
    """
    adapted, preserved = run_routed(layers.part(None, gate_layer), streams, streams)
    open_tokens = decide(preserved[0])
    adapted, preserved = run_routed(layers.part(gate_layer, None), adapted, preserved)
    return adapted, preserved, open_tokens


def gated_states(
    decoder: Decoder, gate: TokenGate, layers: LayerPass, streams: Streams, batch: TokenBatch
) -> HiddenStates:
    """The hidden states of each token's path; a closed token's is without W12, and has an x_up of
    zeros.

    Raises:
        ValueError: the decoder is a base alone, or split over ranks.
    """
    plan = decoder.plan
    if plan is None or decoder.tp.size > 1:
        raise ValueError("a gate needs a base that something was added to, whole on one rank")

    def decide(x: Tensor) -> OpenTokens:
        return decoder.gate_opens(gate, x, batch)

    if decoder.is_routed:
        adapted, preserved, open_tokens = run_routed_with_gate(layers, streams, gate.layer, decide)
        last = decoder.final_norm(*adapted)
        preserved_last = decoder.final_norm(*preserved)
    else:
        layers = decoder.with_own_input(layers, batch.tokens)
        streams, open_tokens = run_gated(
            layers, streams, gate.layer, plan.collaborative_from, decide
        )
        # One path, on which closed tokens had no W12, and nothing of their own.
        last = preserved_last = apply_norm(decoder.final_norm, streams, open_tokens)
    x, x_up = choose_path(open_tokens, preserved_last, last)
    return HiddenStates(x, x_up, open_tokens=open_tokens).one_token_a_row()
