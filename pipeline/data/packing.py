"""Fixed-length samples cut from a corpus' run of tokens: which token is predicted from which, and who may see whom."""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IGNORED = -100


class Sample(NamedTuple):
    """A sequence, each array int64 [S].

    tokens: what the model reads.
    targets: the token after each, or -100 where nothing is to be predicted.
    positions: counted from the beginning of the document, or of the sample where the document began before it.
    document_ids: 0, 1, ... within the sample; attention never crosses from one to another.
    answer_starts: bool [S]; where the target is the first token behind a prompt.
    """

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int64]
    answer_starts: npt.NDArray[np.bool_]


def pack(
    window: npt.NDArray[Any],
    document_starts: npt.NDArray[np.int64],
    sequence_length: int,
    *,
    padding: int,
    document_mask: bool,
    prompts: npt.NDArray[np.bool_] | None = None,
) -> Sample:
    """Makes a sample of up to `sequence_length + 1` consecutive tokens.

    Args:
        window: the tokens, one more than the sample reads; fewer at the end of a corpus, which is padded.
        document_starts: the places in `window` at which a document begins, ascending.
        sequence_length: S.
        padding: the token to fill up with; never predicted, and a document of its own.
        document_mask: keep documents apart. Otherwise the sample is one run of text, and only padding is set apart.
        prompts: which tokens of `window` are read but never predicted, where there are such.
    """
    present = min(len(window), sequence_length)
    tokens = np.full(sequence_length, padding, dtype=np.int64)
    tokens[:present] = window[:present]
    targets = np.full(sequence_length, IGNORED, dtype=np.int64)
    targets[: len(window) - 1] = window[1:]

    borders = document_starts[(document_starts > 0) & (document_starts <= sequence_length)] if document_mask else _NONE
    if present < sequence_length:
        borders = np.append(borders[borders < present], present)
    targets[borders - 1] = IGNORED
    answer_starts = np.zeros(sequence_length, dtype=np.bool_)
    if prompts is not None:
        targets[: len(window) - 1][prompts[1:]] = IGNORED
        answer_starts[: len(window) - 1] = prompts[:-1] & ~prompts[1:]
    inner = borders[borders < sequence_length]
    starts_here = np.zeros(sequence_length, dtype=np.int64)
    starts_here[inner] = 1
    document_ids = np.cumsum(starts_here)
    begins = np.concatenate([[0], inner])
    positions = np.arange(sequence_length, dtype=np.int64) - begins[document_ids]
    return Sample(tokens, targets, positions, document_ids, answer_starts)


def cuts_between_documents(
    document_starts: npt.NDArray[np.int64], tokens: int, sequence_length: int
) -> npt.NDArray[np.int64]:
    """Where samples of at most `sequence_length` begin, if each holds as many whole documents as fit.

    A document longer than a sample begins one, and goes on in the next, with what follows behind its end.
    """
    borders = [*document_starts.tolist(), tokens]
    cuts = [0]
    while cuts[-1] + sequence_length < tokens:
        furthest = cuts[-1] + sequence_length
        border = borders[bisect.bisect_right(borders, furthest) - 1]
        cuts.append(border if border > cuts[-1] else furthest)
    return np.array(cuts, dtype=np.int64)


_NONE = np.zeros(0, dtype=np.int64)
