"""How the new blocks start (section 3.3 of the paper): zero, He-random, or from a singular value decomposition of W.

The paper measured these pairs (W21, W22), from worst to best:
(zero, random) < (random, zero) < (zero, SVD) < (SVD, zero).
At initialisation the logits equal the base model's, bit for bit, because W12 and W_out^up are zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.method import Initialiser, Initialisers
from pipeline.parallel.sharding import full_shape_of
from pipeline.scale.mixture import AddedColumnLinear, AddedRowLinear, stacked
from pipeline.scale.widened_embedding import WidenedEmbedding
from pipeline.scale.widened_linear import WidenedLinear
from pipeline.scale.widened_norm import WidenedHeadNorm, WidenedNorm


def base_to_expansion(kind: Initialiser, base: Tensor, rows: int, *, seed: int, name: str) -> Tensor:
    """W21 [rows, in] for `base: [out, in]`. With SVD, rows beyond the rank of `base` are He-random.

    `name` and `seed` determine the random numbers, so that a block does not depend on the order of computation.
    """
    block = he_random(rows, base.shape[1], seed=seed, name=name)
    if kind == "zero":
        block.zero_()
    elif kind == "svd":
        leading = leading_rows(base, rows)
        block[: leading.shape[0]] = leading
    return block


def expansion_to_expansion(kind: Initialiser, base: Tensor, rows: int, columns: int, *, seed: int, name: str) -> Tensor:
    """W22 [rows, columns] for `base: [out, in]`. The SVD reduces on both sides: `U_kᵀ W V_k`, the leading Σ."""
    if kind == "random":
        return he_random(rows, columns, seed=seed, name=name)
    block = torch.zeros(rows, columns)
    if kind == "svd":
        leading = leading_rows(base, min(rows, columns)).norm(dim=1)
        block[: len(leading), : len(leading)] = torch.diag(leading)
    return block


def he_random(rows: int, columns: int, *, seed: int, name: str) -> Tensor:
    """He's normal initialisation: standard deviation sqrt(2 / columns)."""
    return torch.randn(rows, columns, generator=seeded(seed, name)) * (2.0 / columns) ** 0.5


def seeded(seed: int, name: str) -> torch.Generator:
    """The random generator of the parameter `name`, independent of those of other parameters."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def leading_rows(weight: Tensor, rows: int) -> Tensor:
    """The first `rows` rows of `Uᵀ W = Σ Vᵀ`, where `W = U Σ Vᵀ`: weight [out, in] -> [min(rows, out, in), in].

    Computed from the smaller Gram matrix, in fp64: only the leading directions are needed, and a full SVD of an FFN
    matrix takes ten times as long. Signs are fixed so that the largest entry of each row is positive.
    """
    wide = weight.to(_decomposing_device(), torch.float64)
    count = min(rows, *wide.shape)
    if wide.shape[0] <= wide.shape[1]:
        _, directions = torch.linalg.eigh(wide @ wide.T)
        leading = directions.flip(1)[:, :count].T @ wide
    else:
        eigenvalues, directions = torch.linalg.eigh(wide.T @ wide)
        scales = eigenvalues.flip(0)[:count].clamp_min(0).sqrt()
        leading = scales.unsqueeze(1) * directions.flip(1)[:, :count].T
    return _with_fixed_signs(leading).float().cpu()


def leading_columns(weight: Tensor, columns: int, *, seed: int, name: str) -> Tensor:
    """`W V_k`: `weight: [V, D]` projected on its `columns` leading right-singular directions -> [V, columns].

    This is the initial value of the embedding's new columns. Columns beyond D are He-random.
    """
    wide = weight.to(_decomposing_device(), torch.float64)
    count = min(columns, wide.shape[1])
    _, directions = torch.linalg.eigh(wide.T @ wide)
    leading = directions.flip(1)[:, :count]
    projection = (wide @ _with_fixed_signs(leading.T).T).float().cpu()
    if count == columns:
        return projection
    rest = he_random(weight.shape[0], columns - count, seed=seed, name=name)
    return torch.cat([projection, rest], dim=1)


def _with_fixed_signs(rows: Tensor) -> Tensor:
    """`rows` [n, columns], each with the sign that makes its largest entry positive."""
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    return rows * torch.where(largest < 0, -1.0, 1.0)


def _decomposing_device() -> torch.device:
    """A GPU if there is one: on a CPU the decompositions take minutes per billion parameters."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


ReadBase = Callable[[str], Tensor]
Shapes = Mapping[str, tuple[int, ...]]
"""The unsharded shapes of a model's parameters, by name."""


def initial_expansion(
    model: nn.Module, expansion_names: set[str], read_base: ReadBase, initialisers: Initialisers, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Each of `expansion_names` with its unsharded initial value in fp32, one at a time.

    `model` gives the structure only (it may be on the meta device); `read_base` reads a base parameter by name.
    """
    done, shapes = set(), {name: full_shape_of(parameter) for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        for name, block in _of_module(path, module, shapes, read_base, initialisers, seed):
            done.add(name)
            yield name, block
    # All other blocks start at zero: W12, W_out^up, the biases of the new part.
    for name in sorted(expansion_names - done):
        yield name, torch.zeros(shapes[name])


def _of_module(
    path: str, module: nn.Module, shapes: Shapes, read_base: ReadBase, initialisers: Initialisers, seed: int
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
        of_heads = isinstance(module, WidenedHeadNorm) and gain.shape == shape  # the channels of a head correspond
        yield f"{path}.expansion.weight", (gain if of_heads else gain.mean().expand(shape)).clone()
    elif isinstance(module, WidenedEmbedding) and module.expansion:
        name = f"{path}.expansion.weight"
        _, columns = shapes[name]
        yield name, leading_columns(read_base(f"{path}.base.weight").float(), columns, seed=seed, name=name)


def _base_map(path: str, module: nn.Module, shapes: Shapes, read_base: ReadBase) -> Tensor:
    """W of a widened map, or in a mixture of experts that beside which the map is added: [out, in] in fp32."""
    if isinstance(module, WidenedLinear):
        return read_base(f"{path}.base.weight").float()
    stem, leaf = path.rsplit(".", 1)
    shared = f"{stem}.base.shared.{leaf}.base.weight"
    if shared in shapes:
        return read_base(shared).float()
    experts = read_base(f"{stem}.base.experts.{leaf}.weight").float()
    return stacked(experts, by_columns=isinstance(module, AddedRowLinear))
