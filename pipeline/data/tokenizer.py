"""Loading a tokenizer: Hugging Face folders, `tokenizer.json`, SentencePiece `.model`.

A document becomes `document_start + ids + document_end`: what the base's own post-processor puts before a text (a BOS,
or nothing), and an end-of-document token. Both are recorded in every corpus manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Union

import gigatoken
import numpy as np
import numpy.typing as npt
import sentencepiece
import tokenizers

from pipeline import log
from pipeline.errors import DataError

# --- The libraries that turn texts into ids: two references, and `gigatoken`, trusted only while it agrees with them

# What the fast path must get right before it is tried on a corpus: scripts, spaces, digits, emoji, controls.
_PROBE = (
    "The quick brown fox can't jump over 12,345 lazy dogs.",
    "  leading spaces,\ttabs,\r\nline ends\n\n\n and trailing ones  ",
    "한국어 문장입니다. 정말 재미있어요ㅋㅋㅋ!! 2024년 3월",
    "日本語と中文、Русский, العربية, हिन्दी, e\u0301 café",
    "👩‍👩‍👧 \u200b\ufeff def f(x):\n        return x**2",
    "<s> </s> <unk> <|endoftext|>",
)
_logger = log.get_logger(__name__)


class Encoded(NamedTuple):
    """The ids of several texts, joined: `ids: uint32 [sum of lengths]`, `lengths: int64 [texts]`."""

    ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]


class Encoder(Protocol):
    """Anything that turns texts into ids without adding special tokens to them."""

    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, joined."""
        ...


class HuggingFaceEncoder:
    """The reference for a `tokenizer.json`: the `tokenizers` library."""

    name = "tokenizers"

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library

    def encode(self, texts: Sequence[str]) -> Encoded:
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return _joined([encoding.ids for encoding in encodings])


class SentencePieceEncoder:
    """The reference for a `.model` file: the `sentencepiece` library."""

    name = "sentencepiece"

    def __init__(self, library: sentencepiece.SentencePieceProcessor) -> None:
        self._library = library

    def encode(self, texts: Sequence[str]) -> Encoded:
        return _joined(self._library.encode(list(texts), out_type=int, num_threads=1))

    def special_spellings(self) -> re.Pattern[str]:
        """Matches the spelling of every piece that stands for no text, or for itself."""
        library = self._library
        special = [i for i in range(library.get_piece_size()) if library.is_control(i) or library.is_unknown(i)]
        return re.compile("|".join(re.escape(library.id_to_piece(i)) for i in special))


class GigatokenEncoder:
    """The fast path.

    It remembers every word it meets, so it is made anew after so much text: memory must not follow the corpus.

    Where a text spells a special token (`</s>`), `sentencepiece` sees text and gigatoken the token:
    a batch with such a spelling in it goes to the reference.
    """

    name = "gigatoken"
    characters_between_renewals = 256 * 2**20

    def __init__(self, content: bytes, reference: HuggingFaceEncoder | SentencePieceEncoder) -> None:
        of_sentencepiece = isinstance(reference, SentencePieceEncoder)
        self._make = gigatoken.Tokenizer.from_sentencepiece if of_sentencepiece else gigatoken.Tokenizer.from_json
        self._left_to_reference = reference.special_spellings() if isinstance(reference, SentencePieceEncoder) else None
        self._reference = reference
        self._content = content
        self._library = self._make(content)
        self._characters = 0

    def encode(self, texts: Sequence[str]) -> Encoded:
        if self._left_to_reference and any(map(self._left_to_reference.search, texts)):
            return self._reference.encode(texts)
        characters = sum(map(len, texts))
        if self._characters + characters > self.characters_between_renewals:
            self._library = self._make(self._content)
            self._characters = 0
        self._characters += characters
        layout: Any = self._library.encode_batch(list(texts), parallel=False).layout
        return Encoded(np.asarray(layout.content.data), np.diff(np.asarray(layout.offsets.data)))


def fast_encoder(content: bytes, reference: HuggingFaceEncoder | SentencePieceEncoder) -> Encoder | None:
    """The fast path for the tokenizer file `content`, or None where it is unsupported or differs on a probe text."""
    try:
        encoder = GigatokenEncoder(content, reference)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        _logger.info("gigatoken does not support this tokenizer (%s): %s encodes", _first_line(error), reference.name)
        return None
    if not all(agree(encoder, reference, [text]) for text in _PROBE):
        _logger.warning("gigatoken differs from %s on the probe text: %s encodes", reference.name, reference.name)
        return None
    return encoder


def agree(one: Encoder, other: Encoder, texts: Sequence[str]) -> bool:
    """Whether two encoders give the same ids for each of `texts`."""
    mine, theirs = one.encode(texts), other.encode(texts)
    return np.array_equal(mine.lengths, theirs.lengths) and np.array_equal(mine.ids, theirs.ids)


def _joined(ids: Sequence[Sequence[int]]) -> Encoded:
    lengths = np.fromiter((len(one) for one in ids), dtype=np.int64, count=len(ids))
    flat = np.empty(int(lengths.sum()), dtype=np.uint32)
    at = 0
    for one in ids:
        flat[at : at + len(one)] = one
        at += len(one)
    return Encoded(flat, lengths)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# --- Loading a tokenizer: Hugging Face folders, `tokenizer.json`, ---

_NAMES = ("tokenizer.json", "tokenizer.model", "spiece.model")
# Asked only of a bare tokenizer.json, which does not say which of its special tokens ends a text.
_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")

Library = Union[tokenizers.Tokenizer, sentencepiece.SentencePieceProcessor]
IdOfToken = Callable[[str], Union[int, None]]


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer.

    Attributes:
        path: the file it was read from.
        fingerprint: equal for tokenizers that give equal ids, whatever folder they lie in.
        vocab_size: one more than the largest id.
        document_start: the ids put before every document, often none.
        document_end: the ids put after every document.
        reference: the library that defines the ids.
        fast: the fast path, or None where it does not support this tokenizer.
    """

    path: Path
    fingerprint: str
    vocab_size: int
    document_start: tuple[int, ...]
    document_end: tuple[int, ...]
    reference: Encoder
    fast: Encoder | None
    _library: Library

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of `ids`, special tokens included where the library shows them."""
        plain = [int(token) for token in ids]
        if isinstance(self._library, tokenizers.Tokenizer):
            return str(self._library.decode(plain, skip_special_tokens=False))
        return str(self._library.decode(plain))


def load_tokenizer(path: Path, *, end_of_document: str | None = None) -> Tokenizer:
    """Loads the tokenizer at `path`: a Hugging Face folder, a `tokenizer.json`, or a SentencePiece `.model`.

    Args:
        path: the file or folder.
        end_of_document: the token that ends a document, where the tokenizer's own files do not say or say wrongly.

    Raises:
        DataError: there is no tokenizer, it is damaged, or no token can end a document.
    """
    file = tokenizer_file(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot read this tokenizer: {error.strerror}") from None
    load = _load_sentencepiece if file.suffix == ".model" else _load_hugging_face
    return load(file, content, end_of_document)


def tokenizer_file(path: Path) -> Path:
    """The file that holds the tokenizer at `path`.

    Raises:
        DataError: there is none.
    """
    if path.is_file():
        return path
    for name in _NAMES:
        if (path / name).is_file():
            return path / name
    if path.is_dir():
        raise DataError(f"{path}: expected tokenizer.json or tokenizer.model in this folder, found neither")
    raise DataError(
        f"{path}: no such tokenizer; give a Hugging Face folder, a tokenizer.json or a SentencePiece .model"
    )


def _load_hugging_face(file: Path, content: bytes, end_of_document: str | None) -> Tokenizer:
    try:
        described = json.loads(content)
        library = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001  # the library raises a bare Exception for a file it cannot read
        raise DataError(f"{file}: not a tokenizer.json that can be read: {error}") from None
    library.no_truncation()
    library.no_padding()
    start, end = _post_processed(library)
    reference = HuggingFaceEncoder(library)
    return Tokenizer(
        path=file,
        fingerprint=_fingerprint(described),
        vocab_size=1 + max(library.get_vocab(with_added_tokens=True).values()),
        document_start=start,
        document_end=_document_end(file, library.token_to_id, end_of_document, own_end=end, guess=True),
        reference=reference,
        fast=fast_encoder(content, reference),
        _library=library,
    )


def _load_sentencepiece(file: Path, content: bytes, end_of_document: str | None) -> Tokenizer:
    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise DataError(f"{file}: not a SentencePiece model: {error}") from None

    def id_of_token(token: str) -> int | None:
        found = int(library.piece_to_id(token))
        return None if found == library.unk_id() else found

    adds_bos = _json_beside(file, "tokenizer_config.json").get("add_bos_token", False) and library.bos_id() >= 0
    own_end = (int(library.eos_id()),) if library.eos_id() >= 0 else ()
    reference = SentencePieceEncoder(library)
    return Tokenizer(
        path=file,
        fingerprint="sentencepiece:" + hashlib.sha256(content).hexdigest(),
        vocab_size=int(library.get_piece_size()),
        document_start=(int(library.bos_id()),) if adds_bos else (),
        document_end=_document_end(file, id_of_token, end_of_document, own_end=own_end, guess=False),
        reference=reference,
        fast=fast_encoder(content, reference),
        _library=library,
    )


def _fingerprint(described: dict[str, Any]) -> str:
    """A hash of what decides the ids: truncation and padding do not, and merges have two equal spellings."""
    canonical = {key: value for key, value in described.items() if key not in ("version", "truncation", "padding")}
    model = dict(canonical.get("model", {}))
    if "merges" in model:
        model["merges"] = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    canonical["model"] = model
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return "tokenizers:" + hashlib.sha256(text.encode()).hexdigest()


def _post_processed(library: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer's post-processor puts before and after a text."""
    bare: list[int] = library.encode("a", add_special_tokens=False).ids
    framed: list[int] = library.encode("a", add_special_tokens=True).ids
    at = next(at for at in range(len(framed) + 1) if framed[at : at + len(bare)] == bare)
    return tuple(framed[:at]), tuple(framed[at + len(bare) :])


def _document_end(
    file: Path, id_of_token: IdOfToken, wanted: str | None, *, own_end: tuple[int, ...], guess: bool
) -> tuple[int, ...]:
    """The ids that end a document: the user's word, the tokenizer's own, the files beside it, a well-known token."""
    if wanted is not None:
        if (found := id_of_token(wanted)) is None:
            raise DataError(f"{file}: has no token {wanted!r} to end documents with; name one of its own")
        return (found,)
    if own_end:
        return own_end
    token = _json_beside(file, "tokenizer_config.json").get("eos_token")
    names = [token.get("content") if isinstance(token, dict) else token, *(_KNOWN_ENDS if guess else ())]
    if names[0] is None:
        for name in ("generation_config.json", "config.json"):
            ids = _json_beside(file, name).get("eos_token_id")
            if ids not in (None, []):
                return (int(ids[0] if isinstance(ids, list) else ids),)
    for name in names:
        if name is not None and (found := id_of_token(name)) is not None:
            return (found,)
    raise DataError(f"{file}: does not say which token ends a document; name it with --end-of-document")


def _json_beside(file: Path, name: str) -> dict[str, Any]:
    path = file.parent / name
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not a JSON file: {error}") from None
    return value if isinstance(value, dict) else {}
