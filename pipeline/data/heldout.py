"""No held-out document is in a training part: documents are compared by hashes of their tokens.

Of the held-out documents the hashes are kept in memory, eight bytes each, of the others nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.data.token_corpus import MANIFEST, load_manifest
from pipeline.data.token_shards import Shard, shard_file
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError


def shards_of(folder: Path) -> dict[Path, str]:
    """The shards of a finished corpus, each with the file that its documents come from."""
    manifest = folder / MANIFEST
    return _shards_of(folder, manifest.stat().st_mtime_ns if manifest.exists() else 0)


@lru_cache
def _shards_of(folder: Path, changed: int) -> dict[Path, str]:
    """`changed`: when its manifest was; that of a large corpus is too long to be read for every shard."""
    manifest = load_manifest(folder)
    # A unit's name begins with its file's number.
    return {folder / shard.name: manifest.inputs[int(shard.name.partition("-")[0])].path for shard in manifest.shards}


def check_apart(shard: Path, source: str, heldout: Iterable[Path], tokenizer: Tokenizer) -> None:
    """Raises DataError where a document of a training `shard`, from `source`, is in one of the shards `heldout`."""
    heldout = tuple(heldout)
    known = _known_hashes(tuple((path, shard_file(path, ".bin").stat().st_mtime_ns) for path in heldout))
    opened = Shard(shard)
    hashes = _hashes(opened)
    same = np.flatnonzero(known[np.searchsorted(known[:-1], hashes)] == hashes)
    if len(same):
        first = int(same[0])
        text = tokenizer.decode(opened.document(first)[len(tokenizer.document_start) :][:60])
        folder = next(path.parent for path in heldout if hashes[first] in _hashes(Shard(path)))
        raise DataError(
            f"{source}: the document {text[:60]!r} is also held out, in {folder}; leave it out of one of the two, as "
            "scale-cpt clean does, remove the folder of that one, and start again"
        )


@lru_cache
def _known_hashes(shards: tuple[tuple[Path, int], ...]) -> npt.NDArray[np.uint64]:
    """Those of documents in shards, sorted, and one of nothing, each shard given with the time of its last change."""
    return np.unique(np.concatenate([np.zeros(1, np.uint64), *(_hashes(Shard(shard)) for shard, _ in shards)]))


def _hashes(shard: Shard) -> npt.NDArray[np.uint64]:
    stored = np.memmap(shard.bin_path, np.uint8, "r").data
    starts = (shard.document_starts(0, shard.tokens) * shard.dtype.itemsize).tolist()
    documents = (stored[start:end] for start, end in pairwise([*starts, len(stored)]))
    return np.frombuffer(b"".join(blake2b(ids, digest_size=8).digest() for ids in documents), np.uint64)
