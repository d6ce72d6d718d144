"""Which tokens of a shard are prompts: read, but never predicted.

Beside the `.bin` and the `.idx`, which stay as Megatron has them, `<shard>.prompts.npy` (NumPy's format, int32) holds
one number a document: how many of its tokens, from the first on, are what comes before a text (a BOS) and the prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.token_shards import Shard
from pipeline.errors import DataError
from pipeline.files import published_file


def prompts_file(prefix: Path) -> Path:
    """The file beside a shard."""
    return prefix.with_name(prefix.name + ".prompts.npy")


@contextlib.contextmanager
def writing_prompt_lengths(prefix: Path, scratch: Path | None = None) -> Iterator[list[npt.NDArray[Any]]]:
    """A list to append arrays of lengths to; when the block ends the file is there, whole, if there are any."""
    lengths: list[npt.NDArray[Any]] = []
    yield lengths
    if lengths:
        with published_file(prompts_file(prefix), scratch) as file:
            np.save(file, np.concatenate(lengths).astype(np.int32), allow_pickle=False)


class PromptedShard(Shard):
    """An open shard of documents with prompts.

    Raises:
        DataError: one of its files is missing or damaged, or they do not belong together.
    """

    def __init__(self, prefix: Path) -> None:
        super().__init__(prefix)
        path = prompts_file(prefix)
        try:
            self._prompt_lengths: npt.NDArray[np.int32] = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; a corpus with prompts has one beside every .idx") from None
        except (ValueError, EOFError, OSError) as error:
            raise DataError(f"{path}: not an array of NumPy's format: {error}") from None
        found = self._prompt_lengths
        if found.dtype != np.int32 or found.shape != (self.documents,):
            raise DataError(f"{path}: expected {self.documents} lengths of int32, found {found.shape} of {found.dtype}")

    def prompt_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the tokens [start, stop) belong to a prompt."""
        mask = np.zeros(stop - start, dtype=np.bool_)
        for document in range(self.document_at(start), self.document_at(stop - 1) + 1):
            first = self.document_start(document)
            mask[max(0, first - start) : max(0, first + int(self._prompt_lengths[document]) - start)] = True
        return mask
