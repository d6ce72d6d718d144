"""Training a SentencePiece tokenizer, and comparing tokenizers on given texts."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import sentencepiece

from pipeline.data.records import Keys
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.units import good_documents, sampled_documents
from pipeline.errors import DataError
from pipeline.files import published_file

_MAX_SENTENCE_BYTES = 16_384  # SentencePiece drops longer ones
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


def train_sentencepiece(
    documents: Iterator[str],
    output: Path,
    *,
    vocab_size: int,
    model_type: Literal["bpe", "unigram"],
    character_coverage: float = 0.9999,
    threads: int = 1,
) -> None:
    """Publishes a model with byte fallback at `output` (.model).

    Raises:
        DataError: there is too little text, or it is too uniform, for this vocabulary size.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(documents),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            character_coverage=character_coverage,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].replace("--character_coverage", "--character-coverage")
        raise DataError(f"{output}: cannot train {vocab_size} pieces on this text: {reason}") from None
    output.parent.mkdir(parents=True, exist_ok=True)
    with published_file(output) as file:
        file.write(model.getvalue())


def fertility(tokenizer: Tokenizer, documents: Iterator[str]) -> Fertility:
    """How many tokens `tokenizer` makes of `documents`."""
    encoder = tokenizer.fast or tokenizer.reference
    characters = size = tokens = 0
    while batch := list(islice(documents, _BATCH)):
        characters += sum(map(len, batch))
        size += sum(len(text.encode()) for text in batch)
        tokens += len(encoder.encode(batch).ids)
    return Fertility(characters, size, tokens)


def _sentences(documents: Iterator[str]) -> Iterator[str]:
    """Documents line by line: SentencePiece learns from sentences, and would drop a long document."""
    step = _MAX_SENTENCE_BYTES // 4  # a character has at most four bytes
    for document in documents:
        for line in document.split("\n"):
            yield from (line[at : at + step] for at in range(0, len(line), step))
