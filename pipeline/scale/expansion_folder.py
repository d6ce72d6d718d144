"""The expansion on disk: safetensors files of a few GiB, and a manifest that says of which base and plan they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import BaseModelError, CheckpointError
from pipeline.files import file_hash, is_plain_name, published_folder, write_json
from pipeline.parallel.sharding import REPLICATED, Partition
from pipeline.parallel.stored import Rows, read_shard

FILE_BYTES = 2 * 2**30
MANIFEST = "manifest.json"
FORMAT = "scale-cpt expansion 1"
ENTRIES = ("base", "base_hashes", "method", "seed", "tensors", "hashes")


@dataclass(frozen=True)
class ExpansionFolder:
    """The blocks that were added to a base, read one at a time."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def names(self) -> set[str]:
        """The parameters that the folder holds."""
        return set(self.manifest["tensors"])

    @property
    def is_trained(self) -> bool:
        """Whether it comes from a checkpoint (`--format expansion`): a model made of it is no longer its base."""
        return "position" in self.manifest

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        partition: Partition = REPLICATED,
        tp_rank: int = 0,
        tp_size: int = 1,
        rows: Rows | None = None,
    ) -> Tensor:
        """The parameter `name`, whose whole shape is `shape`, or the shard of it that `tp_rank` holds, or some of its
        rows.

        Raises:
            CheckpointError: it is missing, damaged or of another shape.
        """
        if name not in self.names:
            raise CheckpointError(f"{self.path / MANIFEST}: lists no {name}; make the expansion again")
        file = self.path / self.manifest["tensors"][name]
        try:
            with safe_open(file, framework="pt") as tensors:
                stored = tensors.get_slice(name)
                found = tuple(stored.get_shape())
                if found == shape:
                    return read_shard(stored, partition, tp_rank, tp_size, rows)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged or missing ({error}); make the expansion again") from None
        raise CheckpointError(f"{file}: {name} has shape {found}, expected {shape}; make the expansion again")

    def check_origin(self, base_hashes: Mapping[str, str], method: Mapping[str, Any], seed: int) -> None:
        """Raises where the folder was made of another base (BaseModelError), or by other settings (CheckpointError)."""
        if self.manifest["base_hashes"] != base_hashes:
            raise BaseModelError(
                f"{self.path}: made of the base {self.manifest['base']} with other weights than the run's base; "
                "point `base` at that model, or remove this folder to make it again"
            )
        expected = {"method": method} if self.is_trained else {"method": method, "seed": seed}
        found = {key: self.manifest[key] for key in expected}
        changed = [key for key in expected if expected[key] != found[key]]
        if changed:
            raise CheckpointError(
                f"{self.path}: made with another {' and '.join(changed)} than the run's configuration; "
                "remove this folder to make it again"
            )

    def check_files(self, share: slice = slice(None)) -> None:
        """Raises CheckpointError where a file's content is not what was written. Reads every byte of a `share` of the
        files, sorted by name."""
        for name in sorted(self.manifest["hashes"])[share]:
            file = self.path / name
            if not file.exists() or file_hash(file) != self.manifest["hashes"][name]:
                raise CheckpointError(
                    f"{file}: damaged or missing (another SHA-256 than written); make the expansion again"
                )


def open_expansion(path: Path) -> ExpansionFolder:
    """Opens a folder that `write_expansion` made.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: holds no expansion; make one with tools/upscale.py") from None
    except ValueError as error:
        raise CheckpointError(f"{path / MANIFEST}: damaged ({error}); make the expansion again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: expected the format {FORMAT!r}; make the expansion again")
    tables = (manifest.get("tensors"), manifest.get("hashes"))
    if not manifest.keys() >= set(ENTRIES) or not all(isinstance(table, dict) for table in tables):
        raise CheckpointError(f"{path / MANIFEST}: damaged (expected {', '.join(ENTRIES)}); make the expansion again")
    files = manifest["tensors"].values()
    if not all(isinstance(file, str) and is_plain_name(file) for file in (*files, *manifest["hashes"])):
        raise CheckpointError(f"{path / MANIFEST}: names files outside its folder; do not use it")
    if not manifest["hashes"].keys() >= set(files):
        raise CheckpointError(f"{path / MANIFEST}: damaged (a file without its hash); make the expansion again")
    return ExpansionFolder(path, manifest)


def write_expansion(path: Path, tensors: Iterable[tuple[str, Tensor]], origin: Mapping[str, Any]) -> None:
    """Writes `tensors`, a few GiB at a time, and a manifest with `origin`; the folder appears when it is whole.

    Raises:
        CheckpointError: `path` holds something else, which writing would destroy.
    """
    if path.exists() and not (path / MANIFEST).exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path}: exists and holds no expansion; name another place for the expansion")
    path.parent.mkdir(parents=True, exist_ok=True)
    with published_folder(path) as folder:
        file_of: dict[str, str] = {}
        pending: dict[str, Tensor] = {}

        def write_pending() -> None:
            file = f"expansion-{len(set(file_of.values())) + 1:05d}.safetensors"
            save_file(pending, folder / file)
            file_of.update(dict.fromkeys(pending, file))
            pending.clear()

        for name, tensor in tensors:
            pending[name] = tensor.contiguous()
            if sum(held.nbytes for held in pending.values()) >= FILE_BYTES:
                write_pending()
        if pending:
            write_pending()
        hashes = {file: file_hash(folder / file) for file in sorted(set(file_of.values()))}
        write_json(folder / MANIFEST, {"format": FORMAT, **origin, "tensors": file_of, "hashes": hashes})
