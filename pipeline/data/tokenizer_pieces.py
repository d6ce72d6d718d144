"""The pieces in a tokenizer's files, and the same files with more pieces: tokenizer.json and SentencePiece models.

New ids begin at a given row. Ids below it that the tokenizer does not have become unused pieces, so that every library
counts the ids alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import sentencepiece
import tokenizers
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from pipeline.data.merges import Word
from pipeline.errors import DataError, faults_of_library
from pipeline.files import read_bytes, read_object

Kind = Literal["byte-level BPE", "BPE", "unigram"]
"""How a tokenizer cuts: by merges of bytes; by merges of characters, others becoming bytes; or as is likeliest."""

SPACE = "▁"
"""How pieces of characters spell a space."""
# A word that spans no space is longer only in scripts without spaces; a merge across this many pieces is not learned.
_LONGEST_WORD = 32
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class NewPiece(NamedTuple):
    """A piece to be added, as the file spells it; `pair` are the spellings of the two that it merges, if it does."""

    string: str
    score: float = 0.0
    pair: tuple[str, str] | None = None


@dataclass(frozen=True)
class Pieces:
    """A tokenizer's pieces.

    Attributes:
        kind: how it cuts.
        strings: the pieces of text by id, as the file spells them.
        raw: their UTF-8, which may be part of a character.
        bytes_of: the byte pieces by id, where characters without a piece become bytes.
        scores: of the pieces of a unigram model.
        normalize: what the tokenizer makes of a text before it cuts it.
        words: the ids of texts by words, and of a byte piece those of its byte.
        extended: the file's content with further pieces, the first with the id given.
    """

    kind: Kind
    strings: dict[int, str]
    raw: dict[int, bytes]
    bytes_of: dict[int, int]
    scores: dict[str, float]
    normalize: Callable[[str], str]
    words: Callable[[Sequence[str]], Iterator[Word]]
    extended: Callable[[int, Sequence[NewPiece]], bytes | dict[str, Any]]


def read_pieces(file: Path) -> Pieces:
    """The pieces of the tokenizer in `file`, which `load_tokenizer` has accepted.

    Raises:
        DataError: it is of a kind that cannot be extended.
    """
    return _of_sentencepiece(file) if file.suffix == ".model" else _of_tokenizer_json(file)


def _of_tokenizer_json(file: Path) -> Pieces:
    described = read_object(file, DataError)
    model: dict[str, Any] = described["model"]
    library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()
    library.no_padding()
    added = {int(token["id"]): str(token["content"]) for token in described.get("added_tokens") or ()}
    if model.get("type") == "Unigram":
        entries = {number: str(entry[0]) for number, entry in enumerate(model["vocab"])}
        scores = {str(entry[0]): float(entry[1]) for entry in model["vocab"]}
    elif model.get("type") == "BPE":
        entries, scores = {int(number): piece for piece, number in model["vocab"].items()}, {}
    else:
        raise DataError(f"{file}: expected a BPE or Unigram model, found {model.get('type')!r}; it cannot be extended")
    byte_level = "ByteLevel" in _kinds_in(described.get("pre_tokenizer")) | _kinds_in(described.get("normalizer"))
    kind: Kind = "unigram" if scores else "byte-level BPE" if byte_level else "BPE"
    unusual = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if unusual or (kind == "BPE" and not model.get("byte_fallback")):
        raise DataError(
            f"{file}: expected BPE over bytes or with byte_fallback, without {', '.join(unusual) or 'unknown pieces'}; "
            "it cannot be extended"
        )
    strings = {number: piece for number, piece in entries.items() if number not in added}

    def words(texts: Sequence[str]) -> Iterator[Word]:
        with faults_of_library(f"{file}: cannot encode a text", DataError):
            encodings = library.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            for _, of_word in groupby(zip(encoding.ids, encoding.word_ids, strict=True), lambda token: token[1]):
                yield from _split(strings, [number for number, _ in of_word])

    def extended(first: int, new: Sequence[NewPiece]) -> dict[str, Any]:
        # A piece for every id below: `tokenizers` would give an added token without one another id than its own.
        below = [entries.get(number, added.get(number, _unused(number))) for number in range(first)]
        if kind == "unigram":
            least = min(scores.values())
            listed = [[piece, scores.get(piece, least)] for piece in below]
            return {
                **described,
                "model": {**model, "vocab": [*listed, *([piece.string, piece.score] for piece in new)]},
            }
        vocabulary = {piece: number for number, piece in enumerate([*below, *(piece.string for piece in new)])}
        merges = model["merges"]
        in_one = bool(merges) and isinstance(merges[0], str)
        pairs = [piece.pair for piece in new if piece.pair is not None]
        merges = [*merges, *((" ".join(pair) if in_one else list(pair)) for pair in pairs)]
        return {**described, "model": {**model, "vocab": vocabulary, "merges": merges}}

    normalizer = library.normalizer
    raw, bytes_of = _raw_byte_level(strings) if kind == "byte-level BPE" else _raw(strings)
    return Pieces(
        kind=kind,
        strings={number: strings[number] for number in raw},
        raw=raw,
        bytes_of=bytes_of,
        scores=scores,
        normalize=(lambda text: text) if normalizer is None else normalizer.normalize_str,
        words=words,
        extended=extended,
    )


def _of_sentencepiece(file: Path) -> Pieces:
    proto = sentencepiece_model_pb2.ModelProto()
    content = read_bytes(file, DataError)
    try:
        proto.ParseFromString(content)
    except DecodeError:
        raise DataError(f"{file}: not a SentencePiece model; copy it again") from None
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    types = sentencepiece_model_pb2.ModelProto.SentencePiece
    spec = sentencepiece_model_pb2.TrainerSpec
    kinds: Mapping[int, Kind] = {spec.UNIGRAM: "unigram", spec.BPE: "BPE"}
    kind = kinds.get(proto.trainer_spec.model_type)
    if kind is None or not any(piece.type == types.BYTE for piece in proto.pieces):
        raise DataError(f"{file}: expected a BPE or unigram model with byte fallback; it cannot be extended")
    text = (types.NORMAL, types.BYTE)  # user-defined pieces are never joined
    strings = {number: piece.piece for number, piece in enumerate(proto.pieces) if piece.type in text}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == types.NORMAL}

    def words(texts: Sequence[str]) -> Iterator[Word]:
        for ids in library.encode(list(texts), out_type=int, num_threads=1):
            yield from _split(strings, ids)

    def extended(first: int, new: Sequence[NewPiece]) -> bytes:
        larger = sentencepiece_model_pb2.ModelProto()
        larger.CopyFrom(proto)
        for number in range(len(proto.pieces), first):
            larger.pieces.add(piece=_unused(number), score=0.0, type=types.UNUSED)
        # Of several merges SentencePiece applies that with the highest score, so that the new ones come last.
        lowest = min(scores.values())
        for rank, piece in enumerate(new, 1):
            larger.pieces.add(piece=piece.string, score=piece.score if kind == "unigram" else lowest - rank)
        larger.trainer_spec.vocab_size = len(larger.pieces)
        return bytes(larger.SerializeToString())

    raw, bytes_of = _raw(strings)
    return Pieces(
        kind=kind,
        strings={number: strings[number] for number in raw},
        raw=raw,
        bytes_of=bytes_of,
        scores=scores if kind == "unigram" else {},
        normalize=lambda text: str(library.normalize(text)),
        words=words,
        extended=extended,
    )


def _unused(number: int) -> str:
    # With a space, which no piece of a text has: it is spelled otherwise there.
    return f"<unused {number}>"


def _split(strings: Mapping[int, str], ids: Sequence[int]) -> Iterator[Word]:
    """The ids of a text in stretches that no merge may cross: words begin with their space."""
    start = 0
    for at in range(1, len(ids)):
        if at - start == _LONGEST_WORD or strings.get(ids[at], SPACE).startswith(SPACE):
            yield tuple(ids[start:at])
            start = at
    if len(ids):
        yield tuple(ids[start:])


def _kinds_in(part: Any) -> set[str]:  # noqa: ANN401
    """The types of a pre-tokenizer or normalizer and of those that it is a sequence of."""
    if not isinstance(part, dict):
        return set()
    inner = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {str(part.get("type"))}.union(*map(_kinds_in, inner))


def _raw(strings: Mapping[int, str]) -> tuple[dict[int, bytes], dict[int, int]]:
    """The UTF-8 of pieces of characters, and the byte pieces apart from them."""
    found, bytes_of = {}, {}
    for number, string in strings.items():
        if byte := _BYTE_PIECE.fullmatch(string):
            bytes_of[number] = int(byte[1], 16)
        else:
            found[number] = string.replace(SPACE, " ").encode()
    return found, bytes_of


def _raw_byte_level(strings: Mapping[int, str]) -> tuple[dict[int, bytes], dict[int, int]]:
    """The bytes of pieces in GPT-2's alphabet of printable characters, a character for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    return {
        number: bytes(byte_of[character] for character in string)
        for number, string in strings.items()
        if all(character in byte_of for character in string)
    }, {}
