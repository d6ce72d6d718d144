"""The initial value of every added parameter of a model: which initialiser of the paper each kind
of module takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.method import Initialisers
from pipeline.model.dense_expansion import AddedColumnLinear, AddedRowLinear, stacked
from pipeline.parallel.layers import LowRankAdapter
from pipeline.parallel.parameters import full_shape_of
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
    shapes = {name: full_shape_of(parameter) for name, parameter in model.named_parameters()}
    source = BlockSource(shapes, read_base, initialisers, seed)
    done: set[str] = set()
    for path, module in model.named_modules():
        for name, block in blocks_of_module(path, module, source):
            done.add(name)
            yield name, block
    # All other blocks start at zero: W12, W_out^up, the biases of the new part.
    for name in sorted(expansion_names - done):
        yield name, torch.zeros(shapes[name])


@dataclass(frozen=True)
class BlockSource:
    """What the initial blocks are computed from.

    Attributes:
        shapes: the unsharded shapes of the model's parameters, by name.
        read_base: reads a base parameter by name.
        initialisers: the settings `method.initialisers`.
        seed: determines the random numbers, with the name of each parameter.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read_base: ReadBase
    initialisers: Initialisers
    seed: int


def blocks_of_module(
    path: str, module: nn.Module, source: BlockSource
) -> Iterator[tuple[str, Tensor]]:
    """The blocks of the module at `path` that do not start at zero."""
    if isinstance(module, (AddedColumnLinear, AddedRowLinear)) or (
        isinstance(module, WidenedLinear) and module.base_to_expansion is not None
    ):
        yield from linear_blocks(path, module, _base_map(path, module, source), source)
    elif isinstance(module, (WidenedNorm, WidenedHeadNorm)) and module.expansion is not None:
        yield f"{path}.expansion.weight", _gains(path, module, source)
    elif isinstance(module, LowRankAdapter):
        name = f"{path}.a"
        yield name, initial_a(source.shapes[name], seed=source.seed, name=name)
    elif isinstance(module, WidenedEmbedding) and module.expansion is not None:
        name = f"{path}.expansion.weight"
        _, columns = source.shapes[name]
        base = source.read_base(f"{path}.base.weight").float()
        yield name, leading_columns(base, columns, seed=source.seed, name=name)


def initial_a(shape: tuple[int, ...], *, seed: int, name: str) -> Tensor:
    """A of a difference B A, [rank, in]: uniform in ±1/√in. B starts at zero.

    PEFT draws A by kaiming_uniform_ with a = sqrt(5), whose bound sqrt(6 / ((1 + 5) in)) is
    1 / sqrt(in).
    """
    whole = torch.empty(shape)
    return whole.uniform_(-1, 1, generator=seeded(seed, name)) * shape[1] ** -0.5


def linear_blocks(
    path: str, module: nn.Module, base: Tensor, source: BlockSource
) -> Iterator[tuple[str, Tensor]]:
    """W21 and W22 of the map at `path`, which stands beside the base's map `base` [out, in]."""
    name = f"{path}.base_to_expansion.weight"
    kind = source.initialisers.base_to_expansion
    rows, _ = source.shapes[name]
    if isinstance(module, AddedRowLinear):
        # It reads the experts' sum, which has the rows of the base's map: base.T would read it.
        block = base_to_expansion(kind, base.T, rows, seed=source.seed, name=name)
        if kind == "svd":
            # U_kᵀ alone, without Σ: rows of norm 1.
            leading = min(base.shape)
            block[:leading] = F.normalize(block[:leading])
    else:
        block = base_to_expansion(kind, base, rows, seed=source.seed, name=name)
    yield name, block

    # From the same W as W21. One matrix of the base is in memory at a time.
    name = f"{path}.expansion_to_expansion.weight"
    kind = source.initialisers.expansion_to_expansion
    rows, columns = source.shapes[name]
    yield name, expansion_to_expansion(kind, base, rows, columns, seed=source.seed, name=name)


def _gains(path: str, module: WidenedNorm | WidenedHeadNorm, source: BlockSource) -> Tensor:
    """The gains of the expansion's norm: the mean of the base's, or for heads the base's own."""
    gains = source.read_base(f"{path}.base.weight").float()
    shape = source.shapes[f"{path}.expansion.weight"]
    if isinstance(module, WidenedHeadNorm) and gains.shape == shape:
        return gains.clone()  # the channels of a base's head and of an added one correspond
    # Added channels correspond to none of the base's: a gain of the usual size keeps the maps'
    # inputs on the scale that they were initialised for.
    return gains.mean().expand(shape).clone()


def _base_map(path: str, module: nn.Module, source: BlockSource) -> Tensor:
    """W of a widened map, [out, in] in fp32; in a mixture, the map beside which it is added."""
    if isinstance(module, WidenedLinear):
        return source.read_base(f"{path}.base.weight").float()
    stem, leaf = path.rsplit(".", 1)
    shared = f"{stem}.base.shared.{leaf}.base.weight"
    if shared in source.shapes:
        return source.read_base(shared).float()
    experts = source.read_base(f"{stem}.base.experts.{leaf}.weight").float()
    return stacked(experts, by_columns=isinstance(module, AddedRowLinear))
