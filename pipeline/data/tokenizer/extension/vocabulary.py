"""A tokenizer with more tokens, for a language that it cuts into bytes, and its record.

The guarantee, for every text: one without a character of `character_rows` (after the tokenizer's
normalizer) is cut exactly as before. With BPE, any other is cut as before, but for runs of old
tokens that became one new token each. The proof is in
docs/adr/0023-an-extended-tokenizer-splits-old-text-as-before.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import AliasChoices, BaseModel, Field

from pipeline.data.tokenizer.document_end import json_beside
from pipeline.data.tokenizer.extension.bpe import BpeTokens, merge_pairs, read_bpe_tokens
from pipeline.data.tokenizer.extension.merges import (
    ROW_BITS,
    Pair,
    Word,
    foreign_character_rows,
    learn_merges,
    row_pattern,
)
from pipeline.data.tokenizer.load import Tokenizer, batches, load_tokenizer
from pipeline.data.tokenizer.tokenizer_file import fingerprint_of, json_file
from pipeline.errors import DataError
from pipeline.files.folders import FolderKind, published_folder
from pipeline.files.json_files import read_record, write_json, write_record
from pipeline.files.reading import read_inside
from pipeline.log import progress_bar

RECORD = "vocabulary.json"
EXPORTED = "extended_vocabulary.json"
"""The name of the record beside a trained model: that folder is no extended tokenizer."""
_FORMAT: Literal["scale-cpt vocabulary 1"] = "scale-cpt vocabulary 1"
VOCABULARY = FolderKind("an extended tokenizer", RECORD, _FORMAT)
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a Hugging Face folder's tokenizer is read from beside its tokenizer.json."""
_MAX_TOKEN_BYTES = 96
# Merges learned for each that is asked for, since some turn out to hardly save.
_SPARE = 1.25
# The largest vocabulary that a config.json is believed to have.
_MAX_ROWS = 2**24


class NewToken(BaseModel):
    """A new token: how the tokenizer's file spells it, and which old tokens it replaces."""

    token: str = Field(validation_alias=AliasChoices("token", "piece"))
    replaces: list[int]


class Vocabulary(BaseModel):
    """The record of an extended tokenizer.

    It is read with the names that earlier versions wrote, too.
    """

    format: Literal["scale-cpt vocabulary 1"] = _FORMAT
    kind: str
    """How the tokenizer cuts: BPE or byte-level BPE."""
    base_tokenizer: str
    """The fingerprint of the base's own tokenizer."""
    tokenizer: str
    """The fingerprint of the extended tokenizer."""
    base_rows: int
    """The number of rows in the base's embedding, which is the id of the first new token."""
    character_rows: list[int] = Field(validation_alias=AliasChoices("character_rows", "new_rows"))
    """The rows of characters of which every new token holds one."""
    tokens: list[NewToken] = Field(validation_alias=AliasChoices("tokens", "pieces"))
    """The new tokens in the order of their ids."""
    learned_from: int
    """The number of characters in the sample that the tokens were learned from."""

    @property
    def spelling(self) -> dict[int, list[int]]:
        """The ids of the old tokens that each new one, by its id, stands for."""
        return {number: new.replaces for number, new in enumerate(self.tokens, self.base_rows)}


@dataclass(frozen=True)
class Extension:
    """What extends the tokenizer at `base`: the content of the new file, and its record."""

    base: Path
    content: dict[str, Any]
    record: Vocabulary


def read_vocabulary(folder: Path, name: str = RECORD) -> Vocabulary:
    """The record `name` of the extended tokenizer in `folder`.

    Raises:
        DataError: where it is missing or damaged.
    """
    advice = "make the folder again with scale-cpt vocabulary"
    try:
        return read_record(folder / name, Vocabulary, DataError, advice)
    except FileNotFoundError:
        raise DataError(
            f"{folder}: expected an extended tokenizer with {name}, found none; {advice}"
        ) from None


def exported_spelling(folder: Path) -> dict[int, list[int]]:
    """`Vocabulary.spelling` of the Hugging Face folder of a model with an extended vocabulary.

    Any other folder has none.
    """
    if not (folder / EXPORTED).exists():
        return {}
    return read_vocabulary(folder, EXPORTED).spelling


def learn_extension(
    base: Path, new: Sequence[str], old: Iterable[str], *, add: int, min_uses: int
) -> Extension:
    """Chooses at most `add` tokens for the texts `new`.

    Each has a character that is foreign to the texts `old`.

    Raises:
        DataError: the tokenizer cannot be extended, or no token would be used `min_uses` times.
    """
    tokenizer = load_tokenizer(base)
    tokens = read_bpe_tokens(json_file(base))
    of_new: Counter[str] = Counter()
    of_old: Counter[str] = Counter()
    for counts, texts in ((of_new, new), (of_old, old)):
        for text in texts:
            counts.update(tokens.normalize(text))
    rows = foreign_character_rows(of_new, of_old)
    words: Counter[Word] = Counter()
    with progress_bar("cutting", len(new), " documents") as bar:
        for batch in batches(new):
            words.update(tokens.words(batch))
            bar.update(len(batch))
    found, merges = _new_tokens(tokens, words, rows, add, min_uses)
    if not found:
        raise DataError(
            f"{base}: no token would be used {min_uses} times: the new texts have too few letters "
            "that the old ones do not have; give more text, or keep this tokenizer"
        )
    # New ids begin behind the base's embedding, whose rows may be more than its tokenizer's ids.
    first = max(tokenizer.vocab_size, _rows_of_embedding(base))
    content = tokens.extended(first, [one.token for one in found], merges)
    record = Vocabulary(
        kind="byte-level BPE" if tokens.byte_level else "BPE",
        base_tokenizer=tokenizer.fingerprint,
        tokenizer=fingerprint_of(content),
        base_rows=first,
        character_rows=rows,
        tokens=found,
        learned_from=of_new.total(),
    )
    return Extension(base, content, record)


def _rows_of_embedding(base: Path) -> int:
    """The rows of the base's embedding, which may be more than the tokenizer's ids.

    They are 0 for a tokenizer alone.

    Raises:
        DataError: config.json says no possible number.
    """
    rows = json_beside(json_file(base), "config.json").get("vocab_size", 0)
    if not isinstance(rows, int) or rows > _MAX_ROWS:
        raise DataError(
            f"{base}/config.json: vocab_size: expected a number of rows, found {rows!r:.80}"
        )
    return rows


def write_extension(
    extension: Extension,
    output: Path,
    check: Callable[[Path], None],
    *,
    overwrite: bool | None = None,
) -> None:
    """Publishes the extended tokenizer as the folder `output`, once `check` has accepted it.

    Raises:
        OutputError: `output` is something else.
        DataError: the extended tokenizer cannot be loaded.
    """
    with published_folder(output, VOCABULARY, overwrite=overwrite) as folder:
        if extension.base.is_dir():
            for name in _TOKENIZER_FILES:
                with suppress(FileNotFoundError):
                    (folder / name).write_bytes(read_inside(extension.base, name, DataError))
        write_json(folder / "tokenizer.json", extension.content)
        config = folder / "tokenizer_config.json"
        generation_config = folder / "generation_config.json"
        if not config.exists() and not generation_config.exists():
            # Of a tokenizer.json alone, which does not say what ends a document.
            end = load_tokenizer(extension.base).document_end[-1]
            write_json(generation_config, {"eos_token_id": end})
        # What is published can be loaded, and cuts texts as the guarantee says.
        load_tokenizer(folder)
        check(folder)
        write_record(folder / RECORD, extension.record)


def join_extensions(folder: Path, other: Path) -> None:
    """Adds to the extended tokenizer in `folder` the tokens of `other`, behind its own.

    Both lie beside trained models.

    Their tokens hold characters of different rows, so a text without those of one tokenizer is cut
    as by the other (docs/adr/0023-an-extended-tokenizer-splits-old-text-as-before.md).

    Raises:
        DataError: they have tokens for the same characters.
    """
    first = read_vocabulary(folder, EXPORTED)
    second = read_vocabulary(other, EXPORTED)
    tokens = read_bpe_tokens(json_file(other))
    added = [new.token for new in second.tokens]
    shared = _rows_in(tokens, first) & _rows_in(tokens, second)
    if shared:
        example = _character_of(shared, b" ".join(tokens.raw(token) for token in added))
        raise DataError(
            f"{other.name}: has tokens for the letters that the others' have tokens for, such as "
            f"{example}: text would be cut otherwise than it was trained; combine one of them"
        )
    # Only the merges that make the added tokens: the others are the base's, which both have.
    made = set(added)
    merges: list[Pair] = []
    for left, right in merge_pairs(tokens.described):
        if left + right in made:
            merges.append((left, right))
    behind = first.base_rows + len(first.tokens)
    content = read_bpe_tokens(json_file(folder)).extended(behind, added, merges)
    record = Vocabulary(
        kind=first.kind,
        base_tokenizer=first.base_tokenizer,
        tokenizer=fingerprint_of(content),
        base_rows=first.base_rows,
        character_rows=sorted({*first.character_rows, *second.character_rows}),
        tokens=[*first.tokens, *second.tokens],
        learned_from=first.learned_from + second.learned_from,
    )
    write_json(folder / "tokenizer.json", content)
    write_record(folder / EXPORTED, record)


def _rows_in(tokens: BpeTokens, record: Vocabulary) -> set[int]:
    """The rows of a record of which a new token has a character, or all but its last byte."""
    # With a space between them, so that no two tokens make a character together.
    text = b" ".join(tokens.raw(new.token) for new in record.tokens)
    rows: set[int] = set()
    for row in record.character_rows:
        if row_pattern([row]).search(text):
            rows.add(row)
    return rows


def _character_of(rows: set[int], text: bytes) -> str:
    """A character of `text` that is in one of `rows`.

    Where it has only the first bytes of one, the row's first.
    """
    for character in text.decode(errors="ignore"):
        if ord(character) >> ROW_BITS in rows:
            return character
    return chr(min(rows) << ROW_BITS)


@dataclass
class Cuts:
    """How two tokenizers cut texts. `cut_as_before` counts the documents that both cut alike."""

    documents: int = 0
    characters: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    cut_as_before: int = 0


class CutComparison:
    """Compares how a tokenizer cuts texts before and after, and checks the guarantee on each."""

    def __init__(self, extension: Extension, extended: Path) -> None:
        self._base = extension.base
        self._replaced = extension.record.spelling
        self._before = load_tokenizer(extension.base)
        self._after = load_tokenizer(extended)
        self._normalize = read_bpe_tokens(json_file(extension.base)).normalize
        self._is_new = row_pattern(extension.record.character_rows)

    def of(self, texts: Iterable[str]) -> Cuts:
        """Cuts `texts` with both.

        Raises:
            DataError: where a text is cut in a way that the guarantee rules out.
        """
        cuts = Cuts()
        for batch in batches(texts):
            before = _cut(self._before, batch)
            after = _cut(self._after, batch)
            for text, old, new in zip(batch, before, after, strict=True):
                if new != old:
                    self._check_cut(text, old, new)
                cuts.documents += 1
                cuts.characters += len(text)
                cuts.tokens_before += len(old)
                cuts.tokens_after += len(new)
                cuts.cut_as_before += new == old
        return cuts

    def _check_cut(self, text: str, old: list[int], new: list[int]) -> None:
        """Raises DataError unless the new cut joins old tokens, in a text with a new character."""
        replaced: list[int] = []
        for token in new:
            replaced += self._replaced.get(token, [token])
        has_new_character = self._is_new.search(self._normalize(text).encode()) is not None
        if replaced != old or not has_new_character:
            raise DataError(
                f"{self._base}: the extended tokenizer cuts {text[:60]!r} otherwise than by "
                "joining old tokens; this tokenizer cannot be extended"
            )


def _new_tokens(
    tokens: BpeTokens, words: Counter[Word], rows: Sequence[int], add: int, min_uses: int
) -> tuple[list[NewToken], list[Pair]]:
    """At most `add` new tokens, and the merges of those that are merged.

    The new tokens are characters, where a character that is no token becomes bytes, and then the
    results of merges.
    """
    is_new = row_pattern(rows)
    taken = _taken_spellings(tokens, is_new)
    characters = _new_characters(tokens, words, taken, is_new)
    token_of_byte = {byte: number for number, byte in tokens.bytes_of.items()}
    # The old tokens that each spelling stands for; an old token stands for itself.
    replaces: dict[str, list[int]] = {}
    for number, string in tokens.strings.items():
        replaces[string] = [number]
    new: list[str] = []
    for character, count in characters.most_common(add):
        if count >= min_uses:
            replaces[character] = [token_of_byte[byte] for byte in character.encode()]
            new.append(character)

    def may_join(left: str, right: str) -> bool:
        if not (left and right) or left + right in taken:
            return False
        raw = tokens.raw(left + right)
        return len(raw) <= _MAX_TOKEN_BYTES and is_new.search(raw) is not None

    # Merges of these words. What is no token, a character that was not chosen, is never joined.
    known: Counter[Word] = Counter()
    for word, count in words.items():
        known[tuple(part if part in replaces else "" for part in word)] += count
    left_to_add = add - len(new)
    limit = int(_SPARE * left_to_add)
    merges = learn_merges(known, may_join, limit=limit, min_uses=min_uses)[:left_to_add]
    for left, right in merges:
        replaces[left + right] = replaces[left] + replaces[right]
        new.append(left + right)
    found: list[NewToken] = []
    for string in new:
        found.append(NewToken(token=string, replaces=replaces[string]))
    return found, merges


def _taken_spellings(tokens: BpeTokens, is_new: re.Pattern[bytes]) -> set[str]:
    """The spellings that no new token may have."""
    taken = set(tokens.strings.values())
    if tokens.byte_level:
        return taken
    # SentencePiece, and llama.cpp, join whatever gives a token: no part of an old token may be a
    # new one.
    parts: set[str] = set()
    for string in taken:
        if is_new.search(string.encode()):
            for start in range(len(string)):
                for stop in range(start + 1, len(string) + 1):
                    parts.add(string[start:stop])
    return taken | parts


def _new_characters(
    tokens: BpeTokens, words: Counter[Word], taken: set[str], is_new: re.Pattern[bytes]
) -> Counter[str]:
    """How often each new character occurs that becomes tokens of its bytes.

    None where tokens are made of bytes.
    """
    characters: Counter[str] = Counter()
    if not tokens.bytes_of:
        return characters
    for word, count in words.items():
        for part in word:
            if part and part not in taken and is_new.match(part.encode()):
                characters[part] += count
    return characters


def _cut(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text."""
    ids, lengths = tokenizer.reference.encode(texts)
    return [own.tolist() for own in np.split(ids, np.cumsum(lengths)[:-1])]
