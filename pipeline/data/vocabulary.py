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
from itertools import groupby, islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from pipeline.data.merges import Symbols, Word, learn_merges, new_rows_of_characters, row_pattern
from pipeline.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from pipeline.data.tokenizer_pieces import NewPiece, Pieces, read_pieces
from pipeline.errors import DataError
from pipeline.files import FolderKind, published_folder, read_inside, read_object, read_record, write_json, write_record
from pipeline.log import progress_bar

RECORD = "vocabulary.json"
EXPORTED = "extended_vocabulary.json"
"""The same record beside a model that was trained with the tokenizer: that folder is no extended tokenizer."""
FORMAT: Literal["scale-cpt vocabulary 1"] = "scale-cpt vocabulary 1"
VOCABULARY = FolderKind("an extended tokenizer", RECORD, FORMAT)
_TOKENIZER_FILES = (
    "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""What a Hugging Face folder's tokenizer is read from beside its tokenizer.json."""
_BATCH = 256
_FIRST_SYMBOL = 2**32  # no tokenizer has such ids
_SPARE = 1.25  # learned beyond what is asked for, since some turn out to hardly save


class AddedPiece(BaseModel):
    """A new piece, as the tokenizer's file spells it, and the ids of the old pieces that it replaces."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    piece: str
    replaces: list[int]


class Vocabulary(BaseModel):
    """The record of an extended tokenizer.

    Attributes:
        kind: how the tokenizer cuts.
        base_tokenizer: the fingerprint of the base's own.
        tokenizer: the fingerprint of the extended one.
        base_rows: the rows of the base's embedding: the id of the first new piece.
        new_rows: the rows of characters (code points without their last 6 bits) of which every new piece holds one.
        pieces: the new pieces, in the order of their ids.
        learned_from: characters of the sample.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["scale-cpt vocabulary 1"] = FORMAT
    kind: str
    base_tokenizer: str
    tokenizer: str
    base_rows: int
    new_rows: list[int]
    pieces: list[AddedPiece]
    learned_from: int

    @property
    def spelling(self) -> dict[int, list[int]]:
        """The ids of the old pieces that each new one, by its id, stands for."""
        return {id_: piece.replaces for id_, piece in enumerate(self.pieces, self.base_rows)}


class Cuts(NamedTuple):
    """How two tokenizers cut texts. `cut_as_before` counts the documents that both cut alike."""

    documents: int = 0
    characters: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    cut_as_before: int = 0


@dataclass(frozen=True)
class Extension:
    """What is added to the tokenizer at `base` (a folder or a file)."""

    base: Path
    pieces: list[NewPiece]
    rows: list[int]
    base_rows: int
    learned_from: int


def read_vocabulary(folder: Path, name: str = RECORD) -> Vocabulary:
    """The record `name` of the extended tokenizer in `folder`.

    Raises:
        DataError: it is missing, damaged, or of another tokenizer.
    """
    advice = "make the folder again with tools/extend_vocabulary.py"
    try:
        return read_record(folder / name, Vocabulary, DataError, advice)
    except FileNotFoundError:
        raise DataError(f"{folder}: expected an extended tokenizer with {name}, found none; {advice}") from None


def exported_spelling(folder: Path) -> dict[int, list[int]]:
    """`Vocabulary.spelling` of the Hugging Face folder of a model with an extended vocabulary; empty of any other.

    Raises:
        DataError: the record is damaged.
    """
    return read_vocabulary(folder, EXPORTED).spelling if (folder / EXPORTED).exists() else {}


def base_rows(base: Path) -> int:
    """The rows of a base's embedding, as its config.json says; of a tokenizer alone, its largest id plus one."""
    size = load_tokenizer(base).vocab_size
    rows = 0
    with suppress(FileNotFoundError):
        rows = read_object(tokenizer_file(base).with_name("config.json"), DataError).get("vocab_size", 0)
    if not isinstance(rows, int) or rows > 2**24:
        raise DataError(f"{base}/config.json: vocab_size: expected a number of rows, found {rows!r:.80}")
    return max(size, rows)


def learn_extension(base: Path, new: Sequence[str], old: Iterable[str], *, add: int, min_uses: int) -> Extension:
    """Chooses at most `add` pieces for the texts `new`, each with a character that is foreign to the texts `old`.

    Raises:
        DataError: the tokenizer cannot be extended, or no piece would be used `min_uses` times.
    """
    load_tokenizer(base)
    pieces = read_pieces(tokenizer_file(base))
    of_new: Counter[str] = Counter()
    of_old: Counter[str] = Counter()
    for counts, texts in ((of_new, new), (of_old, old)):
        for text in texts:
            counts.update(pieces.normalize(text))
    rows = new_rows_of_characters(of_new, of_old)
    words: Counter[Word] = Counter()
    with progress_bar("cutting", len(new), " documents") as bar:
        for batch in _batches(new):
            words.update(pieces.words(batch))
            bar.update(len(batch))
    found = _new_pieces(pieces, words, rows, add, min_uses)
    if not found:
        raise DataError(
            f"{base}: no piece would be used {min_uses} times: the new texts have too few letters that the old ones do "
            "not have; give more text, or keep this tokenizer"
        )
    return Extension(base, found, rows, base_rows(base), of_new.total())


def write_extension(
    extension: Extension, output: Path, check: Callable[[Path], None], *, overwrite: bool | None = None
) -> Vocabulary:
    """Publishes the extended tokenizer as the folder `output`, once `check` has accepted it, and returns its record.

    Raises:
        OutputError: `output` is something else.
        DataError: the extended tokenizer cannot be loaded.
    """
    main = tokenizer_file(extension.base)
    base, pieces = load_tokenizer(main), read_pieces(main)
    with published_folder(output, VOCABULARY, overwrite=overwrite) as folder:
        for name in _TOKENIZER_FILES if extension.base.is_dir() else ():
            with suppress(FileNotFoundError):
                (folder / name).write_bytes(read_inside(extension.base, name, DataError))
        write_json(folder / "tokenizer.json", pieces.extended(extension.base_rows, extension.pieces))
        if not (folder / "tokenizer_config.json").exists() and not (folder / "generation_config.json").exists():
            write_json(folder / "generation_config.json", {"eos_token_id": base.document_end[-1]})
        record = Vocabulary(
            kind=pieces.kind,
            base_tokenizer=base.fingerprint,
            tokenizer=load_tokenizer(folder).fingerprint,
            base_rows=extension.base_rows,
            new_rows=extension.rows,
            pieces=[AddedPiece(piece=piece.string, replaces=piece.replaces) for piece in extension.pieces],
            learned_from=extension.learned_from,
        )
        check(folder)
        write_record(folder / RECORD, record)
    return record


class Comparison:
    """How an extended tokenizer and its base cut texts, with the guarantee checked on each of them."""

    def __init__(self, extension: Extension, extended: Path) -> None:
        self._base = extension.base
        self._before, self._after = load_tokenizer(extension.base), load_tokenizer(extended)
        self._pieces = read_pieces(tokenizer_file(extension.base))
        self._is_new = row_pattern(extension.rows)
        self._replaced = {id_: piece.replaces for id_, piece in enumerate(extension.pieces, extension.base_rows)}

    def of(self, texts: Iterable[str]) -> Cuts:
        """Cuts `texts` with both.

        Raises:
            DataError: a text is cut in a way that the guarantee rules out.
        """
        cuts = Cuts()
        for batch in _batches(texts):
            for text, old, new in zip(batch, _cut(self._before, batch), _cut(self._after, batch), strict=True):
                if not self._allows(text, old, new):
                    raise DataError(
                        f"{self._base}: the extended tokenizer cuts {text[:60]!r} otherwise than by joining old "
                        "pieces; this tokenizer cannot be extended"
                    )
                cuts = Cuts(
                    cuts.documents + 1,
                    cuts.characters + len(text),
                    cuts.tokens_before + len(old),
                    cuts.tokens_after + len(new),
                    cuts.cut_as_before + (new == old),
                )
        return cuts

    def _allows(self, text: str, old: list[int], new: list[int]) -> bool:
        if new == old:
            return True
        has_new_characters = self._is_new.search(self._pieces.normalize(text).encode()) is not None
        return has_new_characters and [number for piece in new for number in self._replaced.get(piece, [piece])] == old


def _new_pieces(pieces: Pieces, words: Counter[Word], rows: Sequence[int], add: int, min_uses: int) -> list[NewPiece]:
    """New characters, where those without a piece become bytes, and merges; and what each replaces."""
    is_new = row_pattern(rows)
    taken = set(pieces.strings.values())
    if pieces.kind == "BPE":
        # SentencePiece, and llama.cpp, join whatever gives a piece: from a new piece no old one may be made.
        taken |= {
            piece[start:stop]
            for piece in taken
            if is_new.search(piece.encode())
            for start in range(len(piece))
            for stop in range(start + 1, len(piece) + 1)
        }
    symbols = Symbols(dict(pieces.strings), dict(pieces.raw), taken, is_new, next_id=_FIRST_SYMBOL)
    added: dict[int, NewPiece] = {}
    if pieces.bytes_of:
        byte_ids = {byte: number for number, byte in pieces.bytes_of.items()}
        characters: Counter[str] = Counter()
        for word, count in words.items():
            for part in _characters(pieces, word):
                if isinstance(part, str) and part not in taken and is_new.match(part.encode()):
                    characters[part] += count
        chosen: dict[str, int] = {}
        for character, count in characters.most_common(add):
            if count >= min_uses:
                new = chosen[character] = symbols.add(character, character.encode())
                added[new] = NewPiece(character, [byte_ids[byte] for byte in character.encode()])
        respelled: Counter[Word] = Counter()
        for word, count in words.items():
            parts = (chosen.get(part, -1) if isinstance(part, str) else part for part in _characters(pieces, word))
            respelled[tuple(parts)] += count
        words = respelled
    room = add - len(added)
    for merge in learn_merges(words, symbols, limit=int(_SPARE * room), min_uses=min_uses)[:room]:
        old = [old for part in merge[:2] for old in (added[part].replaces if part in added else [part])]
        pair = symbols.strings[merge.left], symbols.strings[merge.right]
        added[merge.new] = NewPiece(symbols.strings[merge.new], old, pair)
    return list(added.values())


def _characters(pieces: Pieces, word: Word) -> Iterator[int | str]:
    """The ids of a word, with characters in place of the byte pieces that spell them."""
    for is_byte, run in groupby(word, lambda number: number in pieces.bytes_of):
        ids = list(run)
        if is_byte:
            yield from bytes(pieces.bytes_of[number] for number in ids).decode(errors="replace")
        else:
            yield from ids


def _cut(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    ids, lengths = tokenizer.reference.encode(texts)
    yield from (own.tolist() for own in np.split(ids, np.cumsum(lengths)[:-1]))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
