"""The initial expansion of a base: every new block's initial value, and the folder that holds them.

The paper measured these pairs (W21, W22), from worst to best:
(zero, random) < (random, zero) < (zero, SVD) < (SVD, zero).
At initialisation the logits equal the base model's, bit for bit, because W12 and W_out^up are zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.config.method import Initialiser, Initialisers
from pipeline.errors import BaseModelError, CheckpointError, faults_of_library
from pipeline.files import FolderKind, file_hash, is_plain_name, published_folder, read_record, write_json
from pipeline.parallel.sharding import REPLICATED, Partition, Rows, full_shape_of, read_shard
from pipeline.scale.layers import WidenedEmbedding, WidenedHeadNorm, WidenedLinear, WidenedNorm
from pipeline.scale.mixture import AddedColumnLinear, AddedRowLinear, stacked


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


_AGAIN = "make the expansion again"
FILE_BYTES = 2 * 2**30
MANIFEST = "manifest.json"
FORMAT = "scale-cpt expansion 1"
EXPANSION = FolderKind("an expansion", MANIFEST, FORMAT)


class ExpansionManifest(BaseModel):
    """What of manifest.json is read: where the expansion comes from, and its tensors and files with their hashes.

    One that comes from a checkpoint (`--format expansion`) has a `position`, and the fingerprint of the `tokenizer`
    that it was trained with. `base_architecture` is None in one that an earlier version made.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["scale-cpt expansion 1"]
    base: str
    base_hashes: dict[str, str]
    base_architecture: dict[str, Any] | None = None
    method: dict[str, Any]
    seed: int
    tensors: dict[str, str]
    """the file of each"""
    hashes: dict[str, str]
    position: dict[str, Any] | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class ExpansionFolder:
    """The added blocks of a base on disk, read one at a time."""

    path: Path
    manifest: ExpansionManifest

    @property
    def names(self) -> set[str]:
        """The parameters that the folder holds."""
        return set(self.manifest.tensors)

    @property
    def is_trained(self) -> bool:
        """Whether it comes from a checkpoint, so that the logits differ from the base's."""
        return self.manifest.position is not None

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        partition: Partition = REPLICATED,
        tp_rank: int = 0,
        tp_size: int = 1,
        rows: Rows | None = None,
    ) -> Tensor:
        """The shard of the parameter `name` that `tp_rank` holds, or `rows` of it; `shape` is the unsharded shape.

        Raises CheckpointError if it is missing, damaged or of another shape.
        """
        if name not in self.names:
            raise CheckpointError(f"{self.path / MANIFEST}: lists no {name}; {_AGAIN}")
        file = self.path / self.manifest.tensors[name]
        damaged = faults_of_library(f"{file}: damaged or missing; {_AGAIN}", CheckpointError)
        with damaged, safe_open(file, framework="pt") as tensors:
            stored = tensors.get_slice(name)
            if tuple(stored.get_shape()) != shape:
                raise CheckpointError(f"{file}: {name} has shape {stored.get_shape()}, expected {shape}; {_AGAIN}")
            return read_shard(stored, partition, tp_rank, tp_size, rows)

    def check_origin(self, base_hashes: Mapping[str, str], method: Mapping[str, Any], seed: int) -> None:
        """Raises if the folder was made from another base (BaseModelError) or with other settings (CheckpointError)."""
        if self.manifest.base_hashes != base_hashes:
            raise BaseModelError(
                f"{self.path}: made of the base {self.manifest.base} with other weights than the run's base; "
                "point `base` at that model, or remove this folder to make it again"
            )
        changed = ["method"] if self.manifest.method != method else []
        if not self.is_trained and self.manifest.seed != seed:
            changed.append("seed")
        if changed:
            raise CheckpointError(
                f"{self.path}: made with another {' and '.join(changed)} than the run's configuration; "
                "set it back, or remove this folder to make it again (a run with checkpoints needs another `folder`)"
            )

    def check_files(self, share: slice = slice(None)) -> None:
        """Raises CheckpointError if a file has changed since it was written.

        Reads every byte of a `share` of the files, sorted by name.
        """
        for name, expected in sorted(self.manifest.hashes.items())[share]:
            file = self.path / name
            if not file.is_file() or file_hash(file) != expected:
                raise CheckpointError(f"{file}: damaged or missing (another SHA-256 than written); {_AGAIN}")


def open_expansion(path: Path) -> ExpansionFolder:
    """Opens a folder that `write_expansion` made. Raises CheckpointError if the manifest is missing or damaged."""
    try:
        manifest = read_record(path / MANIFEST, ExpansionManifest, CheckpointError, _AGAIN)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: holds no expansion; make one with scale-cpt upscale") from None
    if not all(map(is_plain_name, {*manifest.tensors.values(), *manifest.hashes})):
        raise CheckpointError(f"{path / MANIFEST}: names files outside its folder; do not use it")
    return ExpansionFolder(path, manifest)


def write_expansion(
    path: Path, tensors: Iterable[tuple[str, Tensor]], origin: Mapping[str, Any], *, overwrite: bool | None = None
) -> None:
    """Writes `tensors`, a few GiB at a time, and a manifest with `origin`; the folder appears once it is complete.

    Raises OutputError if `path` is something else.
    """
    with published_folder(path, EXPANSION, overwrite=overwrite) as folder:
        file_of: dict[str, str] = {}
        hashes: dict[str, str] = {}
        for number, held in enumerate(_batches(tensors), start=1):
            file = f"expansion-{number:05d}.safetensors"
            save_file(held, folder / file)
            file_of |= dict.fromkeys(held, file)
            hashes[file] = file_hash(folder / file)
        write_json(folder / MANIFEST, {"format": FORMAT, **origin, "tensors": file_of, "hashes": hashes})


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        held[name] = tensor.contiguous()
        if sum(one.nbytes for one in held.values()) >= FILE_BYTES:
            yield held
            held = {}
    if held:
        yield held
