"""Checks that no held-out document is in a training part.

Documents are compared by hashes of their tokens, and of their letters. Copies that differ in white
space, or in the form of Unicode, have the same letters. A job that knows of held-out parts hashes
the letters of its training documents while it tokenizes them. Where held-out files were named
later, during the work, the letters come from the decoded tokens instead. A training part that was
finished before its held-out part is compared by tokens alone.

Only the hashes of held-out documents are kept in memory, sixteen bytes a document.
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
from pipeline.data.tokenize.queue import JobShare, run_units
from pipeline.data.tokenize.text_hashes import hash_of_letters
from pipeline.data.tokenize.unit_records import STATE, UnitOutcome, WorkUnit, letters_of
from pipeline.data.tokenize.workers import Workers
from pipeline.data.tokenizer.load import cached_tokenizer
from pipeline.errors import DataError
from pipeline.files.publishing import published_file


@dataclass(frozen=True)
class _Compared(WorkUnit):
    """A training shard, and the input file that its documents come from."""

    source: str


def compare_documents(
    job: Job, written: Mapping[Path, str], workers: Workers, share: JobShare
) -> None:
    """Compares the shards that a job has `written` with those of the parts that they are to be
    apart from.

    Each shard is given with the file that its documents come from. Parts that are not made yet are
    compared later.

    Raises:
        DataError: a document of a training part is also held out.
    """
    made = [folder for folder in job.apart_from if (folder / MANIFEST).exists()]
    others: dict[Path, str] = {}
    for folder in made:
        others.update(_shards_of(folder))
    if not others:
        return
    if job.part == "train":
        training = written
        heldout = tuple(others)
    else:
        training = others
        heldout = tuple(written)

    known = _known_hashes(job, heldout)
    # The digest names the outcomes: after a change of either side everything is compared again.
    compared = sha256(known.data)
    for folder in made:
        compared.update((folder / MANIFEST).read_bytes())
    digest = compared.hexdigest()[:16]
    state = job.output / STATE
    saved = state / f"{digest}.npy"
    with published_file(saved) as file:
        np.save(file, known)

    units: list[_Compared] = []
    for shard, source in training.items():
        name = f"{digest}.{shard.parent.name}.{shard.name}"
        units.append(_Compared(name, 1, str(shard), source))
    compare = partial(_compare, job, saved, heldout)
    outcomes = run_units(
        state, UnitOutcome, compare, units, workers, share, what="comparing", measured_in=" shards"
    )
    for _ in outcomes:
        pass


def _known_hashes(job: Job, heldout: tuple[Path, ...]) -> npt.NDArray[np.uint64]:
    """The sorted hashes of all held-out documents: of their tokens, in a train job also of letters.

    The first is 0, so that there is always one.
    """
    hashes = [np.zeros(1, np.uint64)]
    for shard in heldout:
        hashes.append(_hashes(shard))
        if job.part == "train":
            hashes.append(_hashes_of_letters(job, shard))
    return np.unique(np.concatenate(hashes))


def _compare(job: Job, saved: Path, heldout: tuple[Path, ...], compared: _Compared) -> UnitOutcome:
    """Compares one training shard with the held-out hashes in the file `saved`."""
    shard = Path(compared.path)
    # The workers map one file, so that its hashes are in memory once.
    known = np.load(saved, mmap_mode="r")
    same = _is_known(_hashes(shard), known)
    if job.part == "train":
        same |= _is_known(_training_letters(job, shard), known)
    if same.any():
        first = int(np.flatnonzero(same)[0])
        tokenizer = cached_tokenizer(job.tokenizer, job.end_of_document)
        ids = tokenizer.without_frame(Shard(shard).document(first))
        text = tokenizer.decode(ids[:60])
        folder = _folder_of(job, first, shard, heldout)
        raise DataError(
            f"{compared.source}: the document {text[:60]!r} is also held out, in {folder}; leave "
            "it out of one of the two, as scale-cpt clean does, remove the folder of that one, and "
            "start again"
        )
    return UnitOutcome()


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
    # Without its last entry `known` gives every hash a place that exists.
    return known[np.searchsorted(known[:-1], hashes)] == hashes


def _folder_of(job: Job, document: int, shard: Path, heldout: tuple[Path, ...]) -> Path:
    """The held-out part that has a document of a training shard, or a copy of it."""
    tokens = _hashes(shard)[document]
    letters = _hashes_of_letters(job, shard)[document]
    for path in heldout:
        if tokens in _hashes(path) or letters in _hashes_of_letters(job, path):
            return path.parent
    raise AssertionError("the document is in one of the held-out shards")


def _hashes_of_letters(job: Job, shard: Path) -> npt.NDArray[np.uint64]:
    """The hashes of the letters of a shard's documents, decoded."""
    opened = Shard(shard)
    tokenizer = cached_tokenizer(job.tokenizer, job.end_of_document)
    found = []
    for number in range(opened.documents):
        ids = tokenizer.without_frame(opened.document(number))
        found.append(hash_of_letters(tokenizer.decode(ids)))
    return np.frombuffer(b"".join(found), np.uint64)


def _shards_of(folder: Path) -> Iterable[tuple[Path, str]]:
    """The shards of a finished corpus, each with the input file that its documents come from."""
    manifest = load_manifest(folder)
    for shard in manifest.shards:
        # A unit's name begins with its file's number.
        number, _, _ = shard.name.partition("-")
        yield folder / shard.name, manifest.inputs[int(number)].path


def _hashes(shard: Path) -> npt.NDArray[np.uint64]:
    """The hashes of the tokens of a shard's documents."""
    opened = Shard(shard)
    stored = np.memmap(opened.bin_path, np.uint8, "r").data
    starts = (opened.document_starts(0, opened.tokens) * opened.dtype.itemsize).tolist()
    digests: list[bytes] = []
    for start, end in pairwise([*starts, len(stored)]):
        digests.append(blake2b(stored[start:end], digest_size=8).digest())
    return np.frombuffer(b"".join(digests), np.uint64)
