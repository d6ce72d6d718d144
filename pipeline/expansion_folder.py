"""The folder of an expansion: the added blocks of a base, as safetensors with a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config.method import recorded_method
from pipeline.config.reading import flattened
from pipeline.errors import BaseModelError, CheckpointError, faults_of_library
from pipeline.files.folders import FolderKind, published_folder
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_record, with_checksum, write_json
from pipeline.files.reading import is_plain_name
from pipeline.parallel.sharding import REPLICATED, Partition, Rows, read_shard

_AGAIN = "make the expansion again"
FILE_BYTES = 2 * 2**30
MANIFEST = "manifest.json"
FORMAT = "scale-cpt expansion 1"
EXPANSION = FolderKind("an expansion", MANIFEST, FORMAT)


class ExpansionManifest(BaseModel):
    """The entries of manifest.json that are read.

    Attributes:
        base: the path of the base; in an export its name, on the hub or of its folder.
        base_architecture: None in a manifest of an earlier version.
        method: the settings that it depends on, with today's names.
        tensors: the name of the file that holds each tensor.
        hashes: the SHA-256 of each file.
        position: the position of the run that trained it, where the expansion is an export of a
            checkpoint (`--format expansion`).
        trained_as: the settings of that run that change what its weights compute, for the same
            exports; None in those of an earlier version.
        tokenizer: the fingerprint of the tokenizer that it was trained with, for the same exports.
        own_tokens: the ids that have rows of their own; None without open rows.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["scale-cpt expansion 1"]
    base: str
    base_hashes: dict[str, str]
    base_architecture: dict[str, Any] | None = None
    method: Annotated[dict[str, Any], AfterValidator(recorded_method)]
    seed: int
    tensors: dict[str, str]
    hashes: dict[str, str]
    position: dict[str, Any] | None = None
    trained_as: dict[str, Any] | None = None
    tokenizer: str | None = None
    own_tokens: tuple[int, ...] | None = None


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
    def files(self) -> list[Path]:
        """The files of tensors, sorted."""
        return [self.path / name for name in sorted(self.manifest.hashes)]

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
        """The shard of a parameter that `tp_rank` holds, or `rows` of it.

        Args:
            shape: the shape of the whole parameter.

        Raises:
            CheckpointError: it is missing, damaged or of another shape.
        """
        if name not in self.names:
            raise CheckpointError(f"{self.path / MANIFEST}: lists no {name}; {_AGAIN}")
        file = self.path / self.manifest.tensors[name]
        damaged = faults_of_library(f"{file}: damaged or missing; {_AGAIN}", CheckpointError)
        with damaged, safe_open(file, framework="pt") as tensors:
            stored = tensors.get_slice(name)
            if tuple(stored.get_shape()) != shape:
                raise CheckpointError(
                    f"{file}: {name} has shape {stored.get_shape()}, expected {shape}; {_AGAIN}"
                )
            # safetensors reads the slice alone: a rank never holds more than its shard.
            return read_shard(stored, partition, tp_rank, tp_size, rows)

    def check_origin(
        self, base_hashes: Mapping[str, str], method: Mapping[str, Any], seed: int
    ) -> None:
        """Checks that the folder was made from the run's base and with its settings.

        Raises:
            BaseModelError: it was made from another base.
            CheckpointError: it was made with another method or seed.
        """
        if self.manifest.base_hashes != base_hashes:
            raise BaseModelError(
                f"{self.path}: made of the base {self.manifest.base} with other weights than the "
                "run's base; point `base` at that model, or remove this folder to make it again"
            )
        before = dict(flattened({"method": self.manifest.method}))
        now = dict(flattened({"method": method}))
        # The seed made the initial values; those of a trained expansion no longer show it.
        if not self.is_trained:
            before["seed"] = self.manifest.seed
            now["seed"] = seed
        for name in before | now:
            if before.get(name) != now.get(name):
                raise CheckpointError(
                    f"{self.path}: made with another {name} than the run's configuration has "
                    f"(expected {before.get(name)!r}, found {now.get(name)!r}); set it back, or "
                    "remove this folder to make it again (a run with checkpoints needs another "
                    "`folder`)"
                )

    def check_files(self, share: slice = slice(None)) -> None:
        """Compares every byte of a `share` of the files, sorted by name, with their hashes.

        Raises:
            CheckpointError: a file has changed since it was written, or is missing.
        """
        for name, expected in sorted(self.manifest.hashes.items())[share]:
            file = self.path / name
            if not file.is_file() or file_hash(file) != expected:
                raise CheckpointError(
                    f"{file}: damaged or missing (another SHA-256 than written); {_AGAIN}"
                )


def open_expansion(path: Path) -> ExpansionFolder:
    """Opens a folder that `write_expansion` made.

    Manifests of earlier versions have no checksum, and are read without one.

    Raises:
        CheckpointError: the manifest is missing, damaged, or was changed after it was written.
    """
    try:
        manifest = read_record(path / MANIFEST, ExpansionManifest, CheckpointError, _AGAIN)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: holds no expansion; make one with scale-cpt upscale"
        ) from None
    # A manifest may come from a stranger: no name in it may lead out of the folder.
    if not all(map(is_plain_name, {*manifest.tensors.values(), *manifest.hashes})):
        raise CheckpointError(f"{path / MANIFEST}: names files outside its folder; do not use it")
    return ExpansionFolder(path, manifest)


def write_expansion(
    path: Path,
    tensors: Iterable[tuple[str, Tensor]],
    origin: Mapping[str, Any],
    *,
    overwrite: bool | None = None,
) -> None:
    """Writes `tensors`, a few GiB at a time, and a manifest with the entries of `origin`.

    The folder appears when it is complete.

    Raises:
        OutputError: `path` is something else.
    """
    with published_folder(path, EXPANSION, overwrite=overwrite) as folder:
        file_of: dict[str, str] = {}
        hashes: dict[str, str] = {}
        for number, batch in enumerate(_batches(tensors), start=1):
            file = f"expansion-{number:05d}.safetensors"
            save_file(batch, folder / file)
            file_of |= dict.fromkeys(batch, file)
            # Just written, and so still in the page cache.
            hashes[file] = file_hash(folder / file)
        manifest = {"format": FORMAT, **origin, "tensors": file_of, "hashes": hashes}
        write_json(folder / MANIFEST, with_checksum(manifest))


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors in groups of at least `FILE_BYTES`, and the rest."""
    batch: dict[str, Tensor] = {}
    batch_bytes = 0
    for name, tensor in tensors:
        batch[name] = tensor.contiguous()  # safetensors refuses others
        batch_bytes += tensor.nbytes
        if batch_bytes >= FILE_BYTES:
            yield batch
            batch = {}
            batch_bytes = 0
    if batch:
        yield batch
