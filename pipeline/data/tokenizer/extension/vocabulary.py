"""A tokenizer with more pieces, for a language that it cuts into bytes, and the record of what was added.

The guarantee, for every text: one without a character of `new_rows` (after the tokenizer's normalizer) is cut exactly
as before. With BPE, any other is cut as before, but for runs of old pieces that became one new piece each.
docs/adr/0023-old-cuts-stay.md proves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from pipeline.data.tokenizer.extension.bpe import Pieces, read_pieces
from pipeline.data.tokenizer.extension.merges import (
    ROW_BITS,
    Pair,
    Word,
    learn_merges,
    new_rows_of_characters,
    row_pattern,
)
from pipeline.data.tokenizer.load import (
    Tokenizer,
    batches,
    fingerprint_of,
    json_beside,
    json_file,
    load_tokenizer,
)
from pipeline.errors import DataError
from pipeline.files import (
    FolderKind,
    published_folder,
    read_inside,
    read_record,
    write_json,
    write_record,
)
from pipeline.log import progress_bar

RECORD = "vocabulary.json"
EXPORTED = "extended_vocabulary.json"
"""The same record beside a model that was trained with the tokenizer: that folder is no extended tokenizer."""
_FORMAT: Literal["scale-cpt vocabulary 1"] = "scale-cpt vocabulary 1"
VOCABULARY = FolderKind("an extended tokenizer", RECORD, _FORMAT)
_TOKENIZER_FILES = (
    "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""What a Hugging Face folder's tokenizer is read from beside its tokenizer.json."""
_MAX_PIECE_BYTES = 96
_SPARE = 1.25  # learned beyond what is asked for, since some turn out to hardly save


class NewPiece(BaseModel):
    """A new piece, as the tokenizer's file spells it, and the ids of the old pieces that it replaces."""

    piece: str
    replaces: list[int]


class Vocabulary(BaseModel):
    """The record of an extended tokenizer."""

    format: Literal["scale-cpt vocabulary 1"] = _FORMAT
    kind: str
    """how the tokenizer cuts"""
    base_tokenizer: str
    """the fingerprint of the base's own"""
    tokenizer: str
    """that of the extended one"""
    base_rows: int
    """the rows of the base's embedding: the id of the first new piece"""
    new_rows: list[int]
    """the rows of characters (code points without their last 6 bits) of which every new piece holds one"""
    pieces: list[NewPiece]
    """in the order of their ids"""
    learned_from: int
    """characters of the sample"""

    @property
    def spelling(self) -> dict[int, list[int]]:
        """The ids of the old pieces that each new one, by its id, stands for."""
        return {id_: piece.replaces for id_, piece in enumerate(self.pieces, self.base_rows)}


@dataclass(frozen=True)
class Extension:
    """What extends the tokenizer at `base` (a folder or a file): the content of the new file, and its record."""

    base: Path
    content: dict[str, Any]
    record: Vocabulary


def read_vocabulary(folder: Path, name: str = RECORD) -> Vocabulary:
    """The record `name` of the extended tokenizer in `folder`. Raises DataError where it is missing or damaged."""
    advice = "make the folder again with scale-cpt vocabulary"
    try:
        return read_record(folder / name, Vocabulary, DataError, advice)
    except FileNotFoundError:
        raise DataError(
            f"{folder}: expected an extended tokenizer with {name}, found none; {advice}"
        ) from None


def exported_spelling(folder: Path) -> dict[int, list[int]]:
    """`Vocabulary.spelling` of the Hugging Face folder of a model with an extended vocabulary; empty of any other."""
    return read_vocabulary(folder, EXPORTED).spelling if (folder / EXPORTED).exists() else {}


def learn_extension(
    base: Path, new: Sequence[str], old: Iterable[str], *, add: int, min_uses: int
) -> Extension:
    """Chooses at most `add` pieces for the texts `new`, each with a character that is foreign to the texts `old`.

    Raises DataError where the tokenizer cannot be extended, or no piece would be used `min_uses` times.
    """
    tokenizer, pieces = load_tokenizer(base), read_pieces(json_file(base))
    of_new: Counter[str] = Counter()
    of_old: Counter[str] = Counter()
    for counts, texts in ((of_new, new), (of_old, old)):
        for text in texts:
            counts.update(pieces.normalize(text))
    rows = new_rows_of_characters(of_new, of_old)
    words: Counter[Word] = Counter()
    with progress_bar("cutting", len(new), " documents") as bar:
        for batch in batches(new):
            words.update(pieces.words(batch))
            bar.update(len(batch))
    found, merges = _new_pieces(pieces, words, rows, add, min_uses)
    if not found:
        raise DataError(
            f"{base}: no piece would be used {min_uses} times: the new texts have too few letters that the old ones do "
            "not have; give more text, or keep this tokenizer"
        )
    # The rows of the base's embedding; of a tokenizer alone, its largest id plus one.
    rows_in_config = json_beside(json_file(base), "config.json").get("vocab_size", 0)
    if not isinstance(rows_in_config, int) or rows_in_config > 2**24:
        raise DataError(
            f"{base}/config.json: vocab_size: expected a number of rows, found {rows_in_config!r:.80}"
        )
    first = max(tokenizer.vocab_size, rows_in_config)
    content = pieces.extended(first, [piece.piece for piece in found], merges)
    record = Vocabulary(
        kind="byte-level BPE" if pieces.byte_level else "BPE",
        base_tokenizer=tokenizer.fingerprint,
        tokenizer=fingerprint_of(content),
        base_rows=first,
        new_rows=rows,
        pieces=found,
        learned_from=of_new.total(),
    )
    return Extension(base, content, record)


def write_extension(
    extension: Extension,
    output: Path,
    check: Callable[[Path], None],
    *,
    overwrite: bool | None = None,
) -> None:
    """Publishes the extended tokenizer as the folder `output`, once `check` has accepted it.

    Raises OutputError where `output` is something else, DataError where the extended tokenizer cannot be loaded.
    """
    with published_folder(output, VOCABULARY, overwrite=overwrite) as folder:
        for name in _TOKENIZER_FILES if extension.base.is_dir() else ():
            with suppress(FileNotFoundError):
                (folder / name).write_bytes(read_inside(extension.base, name, DataError))
        write_json(folder / "tokenizer.json", extension.content)
        if (
            not (folder / "tokenizer_config.json").exists()
            and not (folder / "generation_config.json").exists()
        ):
            end = load_tokenizer(extension.base).document_end[-1]
            write_json(folder / "generation_config.json", {"eos_token_id": end})
        load_tokenizer(folder)
        check(folder)
        write_record(folder / RECORD, extension.record)


def join_extensions(folder: Path, other: Path) -> None:
    """Adds to the extended tokenizer in `folder` the pieces of `other`, behind its own. Both lie beside trained models.

    Their pieces hold characters of different rows, so a text without those of one tokenizer is cut as by the other
    (docs/adr/0023-old-cuts-stay.md). Raises DataError where they have pieces for the same characters.
    """
    first, second = (read_vocabulary(one, EXPORTED) for one in (folder, other))
    own = read_pieces(json_file(other))
    added = [one.piece for one in second.pieces]
    if shared := _rows_in(own, first) & _rows_in(own, second):
        letters = (one for piece in added for one in own.raw(piece).decode(errors="ignore"))
        example = next(
            (one for one in letters if ord(one) >> ROW_BITS in shared), chr(min(shared) << ROW_BITS)
        )
        raise DataError(
            f"{other.name}: has pieces for the letters that the others' have pieces for, such as {example}: text would "
            "be cut otherwise than it was trained; combine one of them"
        )
    pairs = (
        pair.split(" ") if isinstance(pair, str) else pair
        for pair in own.described["model"]["merges"]
    )
    made = {*added}
    merges = [(left, right) for left, right in pairs if left + right in made]
    content = read_pieces(json_file(folder)).extended(
        first.base_rows + len(first.pieces), added, merges
    )
    changes = {
        "tokenizer": fingerprint_of(content),
        "new_rows": sorted({*first.new_rows, *second.new_rows}),
        "pieces": [*first.pieces, *second.pieces],
        "learned_from": first.learned_from + second.learned_from,
    }
    record = first.model_copy(update=changes)
    write_json(folder / "tokenizer.json", content)
    write_record(folder / EXPORTED, record)


def _rows_in(pieces: Pieces, record: Vocabulary) -> set[int]:
    """Those of a record's rows of which a new piece holds a character, or all but the last byte of one."""
    text = b" ".join(pieces.raw(one.piece) for one in record.pieces)
    return {row for row in record.new_rows if row_pattern([row]).search(text)}


@dataclass
class Cuts:
    """How two tokenizers cut texts. `cut_as_before` counts the documents that both cut alike."""

    documents: int = 0
    characters: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    cut_as_before: int = 0


class Comparison:
    """How an extended tokenizer and its base cut texts, with the guarantee checked on each of them."""

    def __init__(self, extension: Extension, extended: Path) -> None:
        self._base, self._replaced = extension.base, extension.record.spelling
        self._before, self._after = load_tokenizer(extension.base), load_tokenizer(extended)
        self._normalize = read_pieces(json_file(extension.base)).normalize
        self._is_new = row_pattern(extension.record.new_rows)

    def of(self, texts: Iterable[str]) -> Cuts:
        """Cuts `texts` with both. Raises DataError where a text is cut in a way that the guarantee rules out."""
        cuts = Cuts()
        for batch in batches(texts):
            for text, old, new in zip(
                batch, _cut(self._before, batch), _cut(self._after, batch), strict=True
            ):
                spelled = [number for piece in new for number in self._replaced.get(piece, [piece])]
                if new != old and (
                    spelled != old or not self._is_new.search(self._normalize(text).encode())
                ):
                    raise DataError(
                        f"{self._base}: the extended tokenizer cuts {text[:60]!r} otherwise than by joining old "
                        "pieces; this tokenizer cannot be extended"
                    )
                cuts.documents += 1
                cuts.characters += len(text)
                cuts.tokens_before += len(old)
                cuts.tokens_after += len(new)
                cuts.cut_as_before += new == old
        return cuts


def _new_pieces(
    pieces: Pieces, words: Counter[Word], rows: Sequence[int], add: int, min_uses: int
) -> tuple[list[NewPiece], list[Pair]]:
    """New characters, where those without a piece become bytes, and merges of old and new pieces."""
    is_new = row_pattern(rows)
    replaces = {piece: [number] for number, piece in pieces.strings.items()}
    taken = set(replaces)
    if not pieces.byte_level:
        # SentencePiece, and llama.cpp, join whatever gives a piece: from a new piece no old one may be made.
        taken |= {
            piece[start:stop]
            for piece in taken
            if is_new.search(piece.encode())
            for start in range(len(piece))
            for stop in range(start + 1, len(piece) + 1)
        }
    byte_ids = {byte: number for number, byte in pieces.bytes_of.items()}
    characters: Counter[str] = Counter()
    for word, count in words.items() if byte_ids else ():
        for part in word:
            if part and part not in taken and is_new.match(part.encode()):
                characters[part] += count
    chosen = [character for character, count in characters.most_common(add) if count >= min_uses]
    replaces |= {character: [byte_ids[byte] for byte in character.encode()] for character in chosen}

    def may_join(left: str, right: str) -> bool:
        if not (left and right) or left + right in taken:
            return False
        raw = pieces.raw(left + right)
        return len(raw) <= _MAX_PIECE_BYTES and is_new.search(raw) is not None

    known: Counter[Word] = Counter()
    for word, count in words.items():
        known[tuple(part if part in replaces else "" for part in word)] += count
    room = add - len(chosen)
    merges = learn_merges(known, may_join, limit=int(_SPARE * room), min_uses=min_uses)[:room]
    for left, right in merges:
        replaces[left + right] = replaces[left] + replaces[right]
    new = [*chosen, *map("".join, merges)]
    return [NewPiece(piece=piece, replaces=replaces[piece]) for piece in new], merges


def _cut(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    ids, lengths = tokenizer.reference.encode(texts)
    yield from (own.tolist() for own in np.split(ids, np.cumsum(lengths)[:-1]))
