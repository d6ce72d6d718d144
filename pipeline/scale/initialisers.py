"""How the new blocks start: zero, He-random, or from a singular value decomposition of W.

Section 3.3 of the paper. He-random is the normal initialisation of He et al. 2015.
The paper measured these pairs (W21, W22), from worst to best:
(zero, random) < (random, zero) < (zero, SVD) < (SVD, zero).
At initialisation the logits equal the base model's, bit for bit, because W12 and W_out^up are zero.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pipeline.config.method import Initialiser


def base_to_expansion(
    kind: Initialiser, base: Tensor, rows: int, *, seed: int, name: str
) -> Tensor:
    """W21 [rows, in] for `base: [out, in]`. With SVD, rows beyond the rank of `base` are He-random.

    `name` and `seed` determine the random numbers, so that a block does not depend on the order of
    computation.
    """
    block = he_random(rows, base.shape[1], seed=seed, name=name)
    if kind == "zero":
        block.zero_()
    elif kind == "svd":
        leading = leading_rows(base, rows)
        # Σ Vᵀ and not Vᵀ alone: y_up then has the scale of y, so that the norms and the next map
        # see familiar values.
        block[: leading.shape[0]] = leading
    return block


def expansion_to_expansion(
    kind: Initialiser, base: Tensor, rows: int, columns: int, *, seed: int, name: str
) -> Tensor:
    """W22 [rows, columns] for `base: [out, in]`.

    The SVD reduces W on both sides: `U_kᵀ W V_k`, the leading Σ, on the diagonal.
    """
    if kind == "random":
        return he_random(rows, columns, seed=seed, name=name)
    block = torch.zeros(rows, columns)
    if kind == "svd":
        # The norm of row i of Σ Vᵀ is the singular value σ_i.
        leading = leading_rows(base, min(rows, columns)).norm(dim=1)
        block[: len(leading), : len(leading)] = torch.diag(leading)
    return block


def he_random(rows: int, columns: int, *, seed: int, name: str) -> Tensor:
    """He's normal initialisation: standard deviation sqrt(2 / columns)."""
    # Columns are the inputs (fan-in), with He's gain 2 for ReLU, as in the paper; shapes are the
    # whole ones, not a rank's.
    return torch.randn(rows, columns, generator=seeded(seed, name)) * (2.0 / columns) ** 0.5


def seeded(seed: int, name: str) -> torch.Generator:
    """The random generator of the parameter `name`, independent of those of other parameters."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # Shifted by one bit, since `manual_seed` takes signed 64-bit numbers. SHA-256 and not `hash`,
    # which differs between Python processes.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def leading_rows(weight: Tensor, rows: int) -> Tensor:
    """The first `rows` rows of `Uᵀ W = Σ Vᵀ`, where `W = U Σ Vᵀ`.

    weight: [out, in] -> [min(rows, out, in), in]. They are computed from the smaller Gram matrix,
    in fp64: only the leading directions are needed, and a full SVD of an FFN matrix takes ten times
    as long. Signs are fixed so that the largest entry of each row is positive.
    """
    # fp64, because the Gram matrix squares the singular values: in fp32, those below about 1/3000
    # of the largest would be noise.
    wide = weight.to(_decomposing_device(), torch.float64)
    count = min(rows, *wide.shape)
    # `eigh` sorts eigenvalues from the smallest on: `flip` puts the leading directions first.
    if wide.shape[0] <= wide.shape[1]:
        _, directions = torch.linalg.eigh(wide @ wide.T)
        leading = directions.flip(1)[:, :count].T @ wide
    else:
        eigenvalues, directions = torch.linalg.eigh(wide.T @ wide)
        # An eigenvalue of WᵀW is a squared singular value; those near 0 may come out negative by
        # rounding.
        scales = eigenvalues.flip(0)[:count].clamp_min(0).sqrt()
        leading = scales.unsqueeze(1) * directions.flip(1)[:, :count].T
    return _with_fixed_signs(leading).float().cpu()


def leading_columns(weight: Tensor, columns: int, *, seed: int, name: str) -> Tensor:
    """`W V_k`: a matrix projected on its leading right-singular directions.

    weight: [V, D] -> [V, columns], the initial value of the embedding's new columns. Columns beyond
    D are He-random.
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
    # Eigenvectors have no sign of their own: LAPACK and cuSOLVER choose differently, and the
    # expansion would depend on the machine.
    signs = torch.where(largest < 0, -1.0, 1.0)
    return rows * signs


def _decomposing_device() -> torch.device:
    """A GPU if there is one: on a CPU the decompositions take minutes per billion parameters."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
