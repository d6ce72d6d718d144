"""The initial value of every added parameter of a model: which initialiser of the paper each kind
of module takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.method import Initialisers
from pipeline.model.dense_expansion import AddedColumnLinear, AddedRowLinear, stacked
from pipeline.parallel.linear import LowRankAdapter
from pipeline.parallel.sharding import full_shape_of
from pipeline.scale.initialisers import (
    base_to_expansion,
    expansion_to_expansion,
    leading_columns,
    seeded,
)
from pipeline.scale.widened_embedding import WidenedEmbedding
from pipeline.scale.widened_linear import WidenedLinear
from pipeline.scale.widened_norm import WidenedHeadNorm, WidenedNorm

ReadBase = Callable[[str], Tensor]
Shapes = Mapping[str, tuple[int, ...]]
"""The unsharded shapes of a model's parameters, by name."""


def initial_expansion(
    model: nn.Module,
    expansion_names: set[str],
    read_base: ReadBase,
    initialisers: Initialisers,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    """Each of `expansion_names` with its unsharded initial value in fp32, one at a time.

    `model` gives the structure only (it may be on the meta device); `read_base` reads a base
    parameter by name.
    """
    done, shapes = (
        set(),
        {name: full_shape_of(parameter) for name, parameter in model.named_parameters()},
    )
    for path, module in model.named_modules():
        for name, block in _of_module(path, module, shapes, read_base, initialisers, seed):
            done.add(name)
            yield name, block
    # All other blocks start at zero: W12, W_out^up, the biases of the new part.
    for name in sorted(expansion_names - done):
        yield name, torch.zeros(shapes[name])


def _of_module(
    path: str,
    module: nn.Module,
    shapes: Shapes,
    read_base: ReadBase,
    initialisers: Initialisers,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    is_added = isinstance(module, (AddedColumnLinear, AddedRowLinear))
    if is_added or (isinstance(module, WidenedLinear) and module.base_to_expansion):
        base = _base_map(path, module, shapes, read_base)
        name, kind = f"{path}.base_to_expansion.weight", initialisers.base_to_expansion
        rows, _ = shapes[name]
        reads_sum = isinstance(module, AddedRowLinear)  # of the experts, which base.T would read
        block = base_to_expansion(kind, base.T if reads_sum else base, rows, seed=seed, name=name)
        if reads_sum and kind == "svd":
            block[: min(base.shape)] = F.normalize(block[: min(base.shape)])
        yield name, block
        name, kind = f"{path}.expansion_to_expansion.weight", initialisers.expansion_to_expansion
        rows, columns = shapes[name]
        yield name, expansion_to_expansion(kind, base, rows, columns, seed=seed, name=name)
    elif isinstance(module, (WidenedNorm, WidenedHeadNorm)) and module.expansion:
        gain, shape = read_base(f"{path}.base.weight").float(), shapes[f"{path}.expansion.weight"]
        of_heads = (
            isinstance(module, WidenedHeadNorm) and gain.shape == shape
        )  # the channels of a head correspond
        yield f"{path}.expansion.weight", (gain if of_heads else gain.mean().expand(shape)).clone()
    elif isinstance(module, LowRankAdapter):
        name = f"{path}.a"
        yield name, initial_a(shapes[name], seed=seed, name=name)
    elif isinstance(module, WidenedEmbedding) and module.expansion:
        name = f"{path}.expansion.weight"
        _, columns = shapes[name]
        yield (
            name,
            leading_columns(
                read_base(f"{path}.base.weight").float(), columns, seed=seed, name=name
            ),
        )


def initial_a(shape: tuple[int, ...], *, seed: int, name: str) -> Tensor:
    """A of a low-rank difference B A, [rank, in]: uniform in ±1/√in, as in PEFT. B starts at zero."""
    whole = torch.empty(shape)
    return whole.uniform_(-1, 1, generator=seeded(seed, name)) * shape[1] ** -0.5


def _base_map(path: str, module: nn.Module, shapes: Shapes, read_base: ReadBase) -> Tensor:
    """W of a widened map, or in a mixture of experts that beside which the map is added: [out, in]
    in fp32."""
    if isinstance(module, WidenedLinear):
        return read_base(f"{path}.base.weight").float()
    stem, leaf = path.rsplit(".", 1)
    shared = f"{stem}.base.shared.{leaf}.base.weight"
    if shared in shapes:
        return read_base(shared).float()
    experts = read_base(f"{stem}.base.experts.{leaf}.weight").float()
    return stacked(experts, by_columns=isinstance(module, AddedRowLinear))
