"""How large the normalised inputs of a base's blocks are: where the gains of x_up's norms start."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.extensions.hosted.forward_pass import argument_of
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.structure import HostedBlock

_TOKENS = 64
_FIRST_ID = 100
"""Ids below, and the last ones of a vocabulary, are often special tokens, as for pictures."""
_IDS = 900

LAST = (-1, -1)
"""Stands for the states that the output map reads."""


@torch.no_grad()
def input_scales(whole_base: nn.Module, spec: HostedSpec) -> dict[tuple[int, int], float]:
    """The root mean square of each block's input, by layer and block, and of the `LAST` states.

    A norm's gain is no part of a structure, and some bases add 1 to it or scale it elsewhere; what
    it makes of a text is the same for all. The text is some ids of the vocabulary.
    """
    found: dict[tuple[int, int], float] = {}
    handles: list[Any] = []

    def keep(
        place: tuple[int, int],
        block: HostedBlock,
        _: nn.Module,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        found[place] = _root_mean_square(argument_of(block, arguments, options))

    structure = spec.structure
    for index, layer in enumerate(structure.layers):
        module = whole_base.get_submodule(structure.layer_name(layer))
        for number, block in enumerate(layer.blocks):
            hook = partial(keep, (index, number), block)
            entry = module.get_submodule(block.input_module)
            handles.append(entry.register_forward_pre_hook(hook, with_kwargs=True))
    first = min(_FIRST_ID, spec.vocab_size // 4)
    count = min(_IDS, spec.vocab_size // 2)
    tokens = torch.arange(_TOKENS).unsqueeze(0) * 7 % count + first
    body = whole_base.get_submodule(spec.body)
    try:
        last = body(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    found[LAST] = _root_mean_square(last)
    return found


def _root_mean_square(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())
