"""Training a SentencePiece tokenizer on a sample of the same inputs, and comparing tokenizers on given text."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import sentencepiece

from pipeline.data.records import Document, Keys
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.units import default_unit_bytes, input_files, split_file, unit_records
from pipeline.errors import DataError
from pipeline.files import published_file

# SentencePiece drops what is longer, in bytes.
_LONGEST_SENTENCE = 16_384
_BATCH = 256


class Fertility(NamedTuple):
    """How finely a tokenizer cuts a text; without the tokens around documents."""

    characters: int
    bytes: int
    tokens: int

    @property
    def tokens_per_character(self) -> float:
        return self.tokens / max(self.characters, 1)

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / max(self.bytes, 1)


def texts(inputs: Sequence[str], *, text_key: str = "text", max_bytes: int | None = None) -> Iterator[str]:
    """The texts of the good documents of the inputs; with a limit, about the same of each file."""
    return (document.text for document in good_documents(inputs, Keys(text_key), max_bytes=max_bytes))


def good_documents(inputs: Sequence[str], keys: Keys, *, max_bytes: int | None = None) -> Iterator[Document]:
    """The good documents of the inputs, streamed; with a limit, about the same of each file."""
    files = input_files(inputs)
    share = None if max_bytes is None else max_bytes // len(files)
    for file in files:
        yield from _documents_of(file, keys, share)


def _documents_of(file: Path, keys: Keys, max_bytes: int | None) -> Iterator[Document]:
    taken = 0
    for unit in split_file(file, 0, keys, default_unit_bytes([file])):
        for record in unit_records(unit, keys):
            if isinstance(record, Document):
                yield record
                taken += record.utf8_bytes
                if max_bytes is not None and taken >= max_bytes:
                    return


def train_sentencepiece(
    documents: Iterator[str],
    output: Path,
    *,
    vocab_size: int,
    model_type: Literal["bpe", "unigram"],
    character_coverage: float = 0.9999,
    threads: int = 1,
) -> None:
    """Trains a model with byte fallback on `documents` and publishes it at `output` (.model).

    Raises:
        DataError: the text is too little, or too uniform, for so large a vocabulary.
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
            max_sentence_length=_LONGEST_SENTENCE,
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
    """How many tokens the reference of `tokenizer` makes of `documents`."""
    encoder = tokenizer.fast or tokenizer.reference
    characters = size = tokens = 0
    batch: list[str] = []
    for text in documents:
        batch.append(text)
        characters += len(text)
        size += len(text.encode())
        if len(batch) == _BATCH:
            tokens += len(encoder.encode(batch).ids)
            batch = []
    if batch:
        tokens += len(encoder.encode(batch).ids)
    return Fertility(characters, size, tokens)


def _sentences(documents: Iterator[str]) -> Iterator[str]:
    """Documents line by line: SentencePiece learns from sentences, and would drop whole documents as too long."""
    for document in documents:
        for line in document.split("\n"):
            # A character has at most four bytes.
            step = _LONGEST_SENTENCE // 4
            yield from (line[at : at + step] for at in range(0, len(line), step))
