"""No held-out document is in a training part: documents are compared by hashes of their tokens, and of their letters.

Copies that differ in white space, or in the form of Unicode, have the same letters. The hashes of these are made with a
training part where something is held out from it, or from its decoded tokens where that was decided during the work. A
training part that was finished before its held-out part is compared by tokens alone. Of the held-out documents the
hashes are kept in memory, sixteen bytes each, of the others nothing.
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

from pipeline.data.corpus.indexed_dataset import Shard
from pipeline.data.corpus.manifest import MANIFEST, load_manifest
from pipeline.data.tokenize.corpora import Job
from pipeline.data.tokenize.queue import STATE, Outcome, Share, Work, letters_of, run_units
from pipeline.data.tokenize.text_hashes import hash_of_letters
from pipeline.data.tokenize.workers import Workers
from pipeline.data.tokenizer.load import cached_tokenizer
from pipeline.errors import DataError
from pipeline.files import published_file


@dataclass(frozen=True)
class _Compared(Work):
    """A training shard, and the input file that its documents come from."""

    source: str


def compare_documents(
    job: Job, written: Mapping[Path, str], workers: Workers, share: Share
) -> None:
    """Compares the shards that a job has `written` with those of the parts that they are to be apart from.

    Each shard is given with the file that its documents come from. Parts that are not made yet are compared later.

    Raises DataError where a document of a training part is also held out.
    """
    made = [folder for folder in job.apart_from if (folder / MANIFEST).exists()]
    others = {shard: source for folder in made for shard, source in _shards_of(folder)}
    training, heldout = (written, others) if job.part == "train" else (others, written)
    if not others:
        return
    nothing = np.zeros(1, np.uint64)
    known = np.unique(np.concatenate([nothing, *map(_hashes, heldout)]))
    if job.part == "train":
        letters = [_hashes_of_letters(job, shard) for shard in heldout]
        known = np.unique(np.concatenate([known, *letters]))
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
    for _ in run_units(
        state, Outcome, compare, units, workers, share, what="comparing", measured_in=" shards"
    ):
        pass


def _compare(job: Job, saved: Path, heldout: tuple[Path, ...], shard: _Compared) -> Outcome:
    hashes, known = _hashes(Path(shard.path)), np.load(saved, mmap_mode="r")
    same = _is_known(hashes, known)
    if job.part == "train":
        same |= _is_known(_training_letters(job, Path(shard.path)), known)
    if same.any():
        first, tokenizer = (
            int(np.flatnonzero(same)[0]),
            cached_tokenizer(job.tokenizer, job.end_of_document),
        )
        text = tokenizer.decode(
            Shard(Path(shard.path)).document(first)[len(tokenizer.document_start) :][:60]
        )
        folder = _folder_of(job, first, Path(shard.path), heldout)
        raise DataError(
            f"{shard.source}: the document {text[:60]!r} is also held out, in {folder}; leave it out of one of the "
            "two, as scale-cpt clean does, remove the folder of that one, and start again"
        )
    return Outcome()


def _training_letters(job: Job, shard: Path) -> npt.NDArray[np.uint64]:
    """The hashes of the letters of a training shard of the job.

    A shard has none where nothing was held out yet when it was made: then of its decoded tokens.
    """
    saved = letters_of(job.output / STATE, shard.name)
    if saved.exists():
        return np.load(saved)
    return _hashes_of_letters(job, shard)


def _is_known(
    hashes: npt.NDArray[np.uint64], known: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Which of the hashes are among the sorted `known` ones."""
    return known[np.searchsorted(known[:-1], hashes)] == hashes


def _folder_of(job: Job, document: int, shard: Path, heldout: tuple[Path, ...]) -> Path:
    """The held-out part that has a document of a training shard, or a copy of it."""
    tokens = _hashes(shard)[document]
    letters = _hashes_of_letters(job, shard)[document]
    return next(
        path.parent
        for path in heldout
        if tokens in _hashes(path) or letters in _hashes_of_letters(job, path)
    )


def _hashes_of_letters(job: Job, shard: Path) -> npt.NDArray[np.uint64]:
    """The hashes of the letters of a shard's documents, decoded."""
    opened, tokenizer = Shard(shard), cached_tokenizer(job.tokenizer, job.end_of_document)
    start, end = len(tokenizer.document_start), len(tokenizer.document_end)
    found = []
    for number in range(opened.documents):
        ids = opened.document(number)
        found.append(hash_of_letters(tokenizer.decode(ids[start : len(ids) - end])))
    return np.frombuffer(b"".join(found), np.uint64)


def _shards_of(folder: Path) -> Iterable[tuple[Path, str]]:
    manifest = load_manifest(folder)
    for shard in manifest.shards:  # a unit's name begins with its file's number
        yield folder / shard.name, manifest.inputs[int(shard.name.partition("-")[0])].path


def _hashes(shard: Path) -> npt.NDArray[np.uint64]:
    opened = Shard(shard)
    stored = np.memmap(opened.bin_path, np.uint8, "r").data
    starts = (opened.document_starts(0, opened.tokens) * opened.dtype.itemsize).tolist()
    documents = (stored[start:end] for start, end in pairwise([*starts, len(stored)]))
    return np.frombuffer(
        b"".join(blake2b(ids, digest_size=8).digest() for ids in documents), np.uint64
    )
