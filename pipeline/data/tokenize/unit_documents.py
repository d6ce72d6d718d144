"""The documents of one part of a unit: encoded in batches, framed and written to its shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unicodedata import is_normalized

import numpy as np
import numpy.typing as npt

from pipeline.data.corpus.indexed_dataset import ShardWriter
from pipeline.data.sources.records import Document, SpecialTokens
from pipeline.data.tokenize.corpora import Job
from pipeline.data.tokenize.text_hashes import hash_of_letters
from pipeline.data.tokenize.unit_records import UnitPart
from pipeline.data.tokenizer.encoders import Encoded, Encoder, agree, joined
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.data.tokenizer.prompts import spell_pairs
from pipeline.data.tokenizer.spelling import cached_speller
from pipeline.errors import DataError

# With batches of a megabyte the fast encoder is a tenth slower; with larger ones it is no faster.
_BATCH_BYTES = 4 * 2**20
# The beginning of one document per batch is checked: enough to notice an error at little cost.
_CHECKED_CHARACTERS = 2048


def encoder_of(job: Job, tokenizer: Tokenizer) -> Encoder:
    if job.reference_only or tokenizer.fast is None:
        return tokenizer.reference
    return tokenizer.fast


def special_tokens_of(job: Job, tokenizer: Tokenizer) -> SpecialTokens:
    """What a text of `job` that spells a special token becomes."""
    if job.corpus.messages_key is not None:
        # A chat template spells the special tokens that it means.
        return "control"
    return cached_speller(tokenizer, tokenizer.reference, job.corpus.special_tokens).special_tokens


class UnitDocuments:
    """Collects the documents of one part of a unit, encodes them in batches and writes them.

    Either all documents have a prompt or none; either all have a start of their own or none.
    """

    def __init__(self, writer: ShardWriter, tokenizer: Tokenizer, job: Job) -> None:
        self.writer = writer
        self._tokenizer = tokenizer
        self._job = job
        self._is_chat = job.corpus.messages_key is not None
        wanted: SpecialTokens | None = "control" if self._is_chat else job.corpus.special_tokens
        self._speller = cached_speller(tokenizer, encoder_of(job, tokenizer), wanted)
        self._counts = UnitPart()
        self._is_compared = job.part == "train" and bool(job.apart_from)
        self.letters: list[bytes] = []
        """by which the documents are compared with those that are held out"""
        self._batch: list[Document] = []
        self._batch_bytes = 0

    def counted(self) -> UnitPart:
        """The counts of everything written, and what the published files hold."""
        written = {
            "documents": self.writer.documents,
            "tokens": self.writer.tokens,
            "files": self.writer.files,
        }
        return self._counts.model_copy(update=written)

    def add(self, document: Document) -> None:
        self._batch.append(document)
        self._batch_bytes += document.utf8_bytes
        if self._batch_bytes >= _BATCH_BYTES:
            self.write_batch()

    def write_batch(self) -> None:
        """Encodes and writes the documents collected since the last batch."""
        if not self._batch:
            return
        start = self._tokenizer.document_start
        if self._batch[0].start is not None:
            # It is encoded with the prompt.
            start = ()
        end = self._tokenizer.document_end
        (ids, lengths), prompts = self._encoded()
        # A token past the vocabulary would index the embedding out of range in training.
        largest = max(int(ids.max(initial=0)), *start, *end)
        if largest >= self._tokenizer.vocab_size:
            raise DataError(
                f"{self._tokenizer.path}: expected ids below {self._tokenizer.vocab_size}, "
                f"found {largest} around a document; "
                "name the token that ends one with --end-of-document"
            )
        prompt_lengths = None
        if prompts is not None:
            # What stands before a document is read with its prompt, not predicted.
            prompt_lengths = len(start) + prompts
            self._counts.prompt_tokens += int(prompt_lengths.sum())
            for document in self._batch:
                self._counts.prompt_bytes += len((document.prompt or "").encode())
        framed = _framed(ids.astype(self.writer.dtype), lengths, start, end)
        self.writer.add(framed, lengths + len(start) + len(end), prompt_lengths)
        self._count_texts()
        self._batch = []
        self._batch_bytes = 0

    def _count_texts(self) -> None:
        """Counts what is in the batch's texts, and hashes their letters where they are compared."""
        characters = 0
        decomposed = 0
        for document in self._batch:
            text = document.whole_text
            characters += len(text)
            # ASCII is in every form of Unicode, and takes no time to find.
            if not text.isascii() and not is_normalized("NFC", text):
                decomposed += 1
            if self._is_compared:
                utf8 = document.utf8 if document.prompt is None else None
                self.letters.append(hash_of_letters(text, utf8))
        self._counts.characters += characters
        self._counts.decomposed_documents += decomposed
        self._counts.bytes += self._batch_bytes

    def _encoded(self) -> tuple[Encoded, npt.NDArray[np.int64] | None]:
        """The ids of the batch's documents, and how many of each are its prompt, if any is."""
        if self._batch[0].ids is not None:
            return joined([document.ids or [] for document in self._batch]), None
        # Another document in each batch, and the same one when a unit is done again.
        checked = self._batch[self.writer.documents % len(self._batch)]
        self._check_encoder(checked.text[:_CHECKED_CHARACTERS])
        texts = [document.text for document in self._batch]
        prompt_tokens = None
        if self._batch[0].prompt is not None:
            prompts: list[str] = []
            for document in self._batch:
                prompts.append((document.start or "") + (document.prompt or ""))
            spelled, prompt_tokens = spell_pairs(self._speller, prompts, texts)
        else:
            utf8: list[bytes] = []
            for document in self._batch:
                utf8.append(document.text.encode() if document.utf8 is None else document.utf8)
            spelled = self._speller.spell(texts, utf8)
        if not self._is_chat:
            # A chat's template spells special tokens, so there they are no finding.
            self._counts.special_tokens_spelled += spelled.special_tokens
        self._counts.unknown_tokens += spelled.unknown_tokens
        self._counts.lost_characters += spelled.lost_characters
        return spelled.encoded, prompt_tokens

    def _check_encoder(self, text: str) -> None:
        """Compares the fast encoder with the reference on `text`.

        Raises:
            DataError: they give other ids.
        """
        encoder = encoder_of(self._job, self._tokenizer)
        reference = self._tokenizer.reference
        if encoder is not reference and not agree(encoder, reference, [text]):
            raise DataError(
                f"{encoder.name} and {reference.name} differ on {text[:60]!r}; "
                f"remove {self._job.output} and start again with --reference-only"
            )


def _framed(
    ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], start: Sequence[int], end: Sequence[int]
) -> npt.NDArray[Any]:
    """The ids of documents, joined, with `start` before and `end` after each, of the same type.

    Args:
        ids: of all documents, one behind the other.
        lengths: of each document in `ids`.
        start: the tokens before each document.
        end: the tokens after each document.
    """
    stops = np.cumsum(lengths)
    starts = stops - lengths
    # A row for each document: where in `ids` each token of its frame is inserted. np.insert takes
    # places in the unchanged array, and keeps the order of several tokens at one place, so that the
    # end of a document precedes the start of the next.
    places = np.column_stack([starts] * len(start) + [stops] * len(end))
    frame = np.tile([*start, *end], len(lengths))
    return np.insert(ids, places.ravel(), frame)
