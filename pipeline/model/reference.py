"""The base's own hidden states of self-generated text, which KL(base || model) compares the model
with.

Where they come from depends on the model (`states_with_reference` chooses):

- Preserve, and the preserved path of Route, have the base's stream as their own.
- Adapt, LoRA and LLaMA Pro keep the base unchanged: it runs beside the model (`run_beside_base`).
- Full fine-tuning and Freeze change the base itself: a frozen copy runs after the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.model.hidden_states import HiddenStates
from pipeline.model.paths import LayerPass, TokenBatch
from pipeline.open_tokens import NONE_OPEN
from pipeline.scale.widened_linear import Streams

if TYPE_CHECKING:  # it imports this module
    from pipeline.model.decoder import Decoder


def run_beside_base(
    layers: LayerPass,
    streams: Streams,
    base_layers: LayerPass,
    sequences: int,
) -> tuple[Streams, Tensor | None]:
    """The whole model, and beside it the base alone on the first `sequences` sequences, without
    gradients.

    `base_layers` are the same layers, with the contexts of these sequences. Layer by layer, so that
    ZeRO-3 gathers each layer once for both. Below the first layer with W12 both are one, so the
    base starts there. Returns the model's streams and the base's x: [R, S, D]; None if no layer has
    W12, since then x itself is the base's.
    """
    base_x: Tensor | None = None
    for layer in layers.layers:
        if layer.collaborative:
            if base_x is None:
                # Up to here the stream is the base's own, to the bit: it need not be computed
                # twice.
                base_x = streams[0][:sequences].detach()
            with torch.no_grad():
                base_x, _ = base_layers.run(layer, (base_x, None), open_tokens=NONE_OPEN)
        streams = layers.run(layer, streams)
    return streams, base_x


def states_with_reference(decoder: Decoder, batch: TokenBatch, sequences: int) -> HiddenStates:
    """The hidden states, and as their `reference` the base's own of the first `sequences`."""
    of_base = batch.first_sequences(sequences)
    if decoder.equals_base:
        hidden = decoder.hidden_states(*batch)
        return replace(hidden, reference=hidden.x[: of_base.tokens.numel()].detach())
    if decoder.reference is not None:
        hidden = decoder.hidden_states(*batch)
        with torch.no_grad():
            return replace(hidden, reference=decoder.reference.hidden_states(*of_base).x)
    if decoder.is_routed:
        hidden = decoder.hidden_states(*batch)
        assert hidden.preserved_x is not None, "Route has a preserved path"
        return replace(hidden, reference=hidden.preserved_x[: of_base.tokens.numel()].detach())

    streams = decoder.embedded(batch.tokens)
    dtype = streams[0].dtype
    layers = decoder.with_own_input(decoder.layer_pass(batch, dtype), batch.tokens)
    base_layers = decoder.layer_pass(of_base, dtype)
    streams, base_x = run_beside_base(layers, streams, base_layers, sequences)
    hidden = decoder.final_states(streams)
    if base_x is None:
        # Preserve: the model's base stream is the base's.
        return replace(hidden, reference=hidden.x[: of_base.tokens.numel()].detach())
    with torch.no_grad():
        return replace(
            hidden, reference=decoder.final_states((base_x, None), open_tokens=NONE_OPEN).x
        )
