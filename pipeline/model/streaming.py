"""A decoder of which at most one module is in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from pipeline.model.decoder import Decoder


def stream_weights(
    decoder: Decoder,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Callable[[], None]:
    """Makes `decoder`, on the meta device and of type `dtype`, get its weights from `read`, which
    takes their names.

    A module reads its weights before its forward pass and drops them after it.
    `OutputProjection.logits` is no forward pass: the function that is returned reads the weights of
    the output projection, to keep.
    """
    own = {name for name, _ in decoder.named_parameters()}

    def fill(prefix: str, module: nn.Module, *_: object) -> None:
        values: dict[str, Tensor] = {}
        for name, _parameter in module.named_parameters():
            path = prefix + name
            if path not in own:
                # A tied output projection has no values of its own.
                path = "embedding.base.weight"
            values[name] = read(path).to(device, dtype)
        # `assign`, because copying into a tensor on the meta device does nothing.
        module.load_state_dict(values, assign=True)

    def drop(module: nn.Module, *_: object) -> None:
        module.to("meta")

    modules: dict[str, nn.Module] = {
        "embedding.": decoder.embedding,
        "final_norm.": decoder.final_norm,
        "output.": decoder.output,
    }
    if decoder.own_input is not None:
        modules["own_input."] = decoder.own_input
    for index, layer in enumerate(decoder.layers):
        modules[f"layers.{index}."] = layer
    for prefix, module in modules.items():
        module.register_forward_pre_hook(partial(fill, prefix))
        module.register_forward_hook(drop)
    return partial(fill, "output.", decoder.output)
