"""The initial expansion of a base: every new block's starting value, from the base weight beside it.

At these values the widened model's logits equal the base model's, bit for bit: W12 and W_out^up are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from pipeline.config.method import Initialisers
from pipeline.parallel.parameter import full_shape_of
from pipeline.scale.embedding import WidenedEmbedding
from pipeline.scale.initialisers import base_to_expansion, expansion_to_expansion, leading_columns
from pipeline.scale.linear import WidenedLinear
from pipeline.scale.norm import WidenedNorm

ReadBase = Callable[[str], Tensor]


def initial_expansion(
    model: nn.Module, expansion_names: set[str], read_base: ReadBase, initialisers: Initialisers, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Each of `expansion_names` with its whole, unsharded starting value in fp32, one at a time.

    `model` gives the structure only (it may lie on the meta device); `read_base` gives a base parameter by its name.
    """
    done = set()
    for path, module in model.named_modules():
        for name, block in _of_module(path, module, read_base, initialisers, seed):
            done.add(name)
            yield name, block
    # What no rule names starts at zero: W12, W_out^up, the biases of the new part.
    shapes = {name: full_shape_of(parameter) for name, parameter in model.named_parameters()}
    for name in sorted(expansion_names - done):
        yield name, torch.zeros(shapes[name])


def _of_module(
    path: str, module: nn.Module, read_base: ReadBase, initialisers: Initialisers, seed: int
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, WidenedLinear) and module.base_to_expansion and module.expansion_to_expansion:
        base = read_base(f"{path}.base.weight").float()
        name = f"{path}.base_to_expansion.weight"
        rows, _ = full_shape_of(_weight(module.base_to_expansion))
        yield name, base_to_expansion(initialisers.base_to_expansion, base, rows, seed=seed, name=name)
        name = f"{path}.expansion_to_expansion.weight"
        rows, columns = full_shape_of(_weight(module.expansion_to_expansion))
        kind = initialisers.expansion_to_expansion
        yield name, expansion_to_expansion(kind, base, rows, columns, seed=seed, name=name)
    elif isinstance(module, WidenedNorm) and module.expansion:
        gain = read_base(f"{path}.base.weight").float().mean()
        yield f"{path}.expansion.weight", gain.expand(full_shape_of(module.expansion.weight)).clone()
    elif isinstance(module, WidenedEmbedding) and module.expansion:
        name = f"{path}.expansion.weight"
        _, columns = full_shape_of(module.expansion.weight)
        yield name, leading_columns(read_base(f"{path}.base.weight").float(), columns, seed=seed, name=name)


def _weight(block: nn.Module) -> Tensor:
    return block.get_parameter("weight")
