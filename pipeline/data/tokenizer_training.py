"""The texts that tokenizers learn from, and how many tokens they make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from pipeline.data.records import Keys
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.units import good_documents, sampled_documents

_BATCH = 256


class Fertility(NamedTuple):
    """How many tokens a tokenizer makes of a text, without those around documents."""

    characters: int
    bytes: int
    tokens: int

    @property
    def tokens_per_character(self) -> float:
        return self.tokens / max(self.characters, 1)

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / max(self.bytes, 1)


def texts(
    inputs: Sequence[str], *, text_key: str = "text", max_bytes: int | None = None, seed: int | None = None
) -> Iterator[str]:
    """Streams the texts of the usable documents of the inputs, about `max_bytes` of them.

    That is the beginning of each file, or with `seed` random places in some of the files.
    """
    if seed is not None and max_bytes is not None:
        return (document.text for document in sampled_documents(inputs, Keys(text_key), max_bytes, seed=seed)[0])
    return (document.text for document in good_documents(inputs, Keys(text_key), max_bytes=max_bytes))


def fertility(tokenizer: Tokenizer, documents: Iterator[str]) -> Fertility:
    """How many tokens `tokenizer` makes of `documents`."""
    encoder = tokenizer.fast or tokenizer.reference
    characters = size = tokens = 0
    while batch := list(islice(documents, _BATCH)):
        characters += sum(map(len, batch))
        size += sum(len(text.encode()) for text in batch)
        tokens += len(encoder.encode(batch).ids)
    return Fertility(characters, size, tokens)
