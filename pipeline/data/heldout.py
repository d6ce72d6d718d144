"""No held-out document is in a training part: documents are compared by hashes of their tokens.

Of the held-out documents the hashes are kept in memory, eight bytes each, of the others nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.data.corpora import Job
from pipeline.data.jobs import STATE, Outcome, Share, Work, run_units
from pipeline.data.token_corpus import MANIFEST, load_manifest
from pipeline.data.token_shards import Shard
from pipeline.data.tokenizer import cached_tokenizer
from pipeline.data.workers import Workers
from pipeline.errors import DataError
from pipeline.files import published_file


@dataclass(frozen=True)
class _Compared(Work):
    """A training shard, and the input file that its documents come from."""

    source: str


def compare_documents(job: Job, written: Mapping[Path, str], workers: Workers, share: Share) -> None:
    """Compares the shards that a job has `written` with those of the parts that they are to be apart from.

    Each shard is given with the file that its documents come from. Parts that are not made yet are compared later.

    Raises DataError where a document of a training part is also held out.
    """
    made = [folder for folder in job.apart_from if (folder / MANIFEST).exists()]
    others = {shard: source for folder in made for shard, source in _shards_of(folder)}
    training, heldout = (written, others) if job.part == "train" else (others, written)
    if not others:
        return
    known = np.unique(np.concatenate([np.zeros(1, np.uint64), *map(_hashes, heldout)]))  # and one of nothing
    compared = sha256(known.data)  # after a change of either side everything is compared again
    for folder in made:
        compared.update((folder / MANIFEST).read_bytes())
    digest = compared.hexdigest()[:16]
    state = job.output / STATE
    saved = state / f"{digest}.npy"
    with published_file(saved) as file:
        np.save(file, known)
    units = [
        _Compared(f"{digest}.{shard.parent.name}.{shard.name}", 1, str(shard), source)
        for shard, source in training.items()
    ]
    compare = partial(_compare, job, saved, tuple(heldout))
    for _ in run_units(state, Outcome, compare, units, workers, share, what="comparing", measured_in=" shards"):
        pass


def _compare(job: Job, saved: Path, heldout: tuple[Path, ...], shard: _Compared) -> Outcome:
    hashes, known = _hashes(Path(shard.path)), np.load(saved, mmap_mode="r")
    same = np.flatnonzero(known[np.searchsorted(known[:-1], hashes)] == hashes)
    if len(same):
        first, tokenizer = int(same[0]), cached_tokenizer(job.tokenizer, job.end_of_document)
        text = tokenizer.decode(Shard(Path(shard.path)).document(first)[len(tokenizer.document_start) :][:60])
        folder = next(path.parent for path in heldout if hashes[first] in _hashes(path))
        raise DataError(
            f"{shard.source}: the document {text[:60]!r} is also held out, in {folder}; leave it out of one of the "
            "two, as scale-cpt clean does, remove the folder of that one, and start again"
        )
    return Outcome()


def _shards_of(folder: Path) -> Iterable[tuple[Path, str]]:
    manifest = load_manifest(folder)
    for shard in manifest.shards:  # a unit's name begins with its file's number
        yield folder / shard.name, manifest.inputs[int(shard.name.partition("-")[0])].path


def _hashes(shard: Path) -> npt.NDArray[np.uint64]:
    opened = Shard(shard)
    stored = np.memmap(opened.bin_path, np.uint8, "r").data
    starts = (opened.document_starts(0, opened.tokens) * opened.dtype.itemsize).tolist()
    documents = (stored[start:end] for start, end in pairwise([*starts, len(stored)]))
    return np.frombuffer(b"".join(blake2b(ids, digest_size=8).digest() for ids in documents), np.uint64)
