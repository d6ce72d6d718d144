"""The base's own hidden states of self-generated text, which KL(base || model) compares the model
with.

Where they come from depends on the model (`Decoder.forward` chooses):

- Preserve, and the preserved path of Route, have the base's stream as their own.
- Adapt, LoRA and LLaMA Pro keep the base unchanged: it runs beside the model (`run_beside_base`).
- Full fine-tuning and Freeze change the base itself: a frozen copy runs after the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.model.paths import LayerPass
from pipeline.open_tokens import NONE_OPEN
from pipeline.scale.widened_linear import Streams


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
