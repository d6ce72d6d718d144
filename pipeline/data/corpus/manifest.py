"""The manifest of a token corpus: what it was made of, and what its shards hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, NonNegativeInt, PositiveInt

from pipeline.data.corpus.indexed_dataset import FileContent, ShardFile
from pipeline.data.sources.records import (
    DocumentUnit,
    HeldoutBy,
    Normalization,
    Quoting,
    SpecialTokens,
)
from pipeline.errors import DataError
from pipeline.files.folders import FolderKind, other_kind
from pipeline.files.json_files import read_record, write_record
from pipeline.files.reading import is_plain_name

MAKERS = "scale-cpt tokenize (or scale-cpt sample, for text that the base writes)"
MANIFEST = "manifest.json"
"""Written last: without it a corpus is unfinished."""
CORPUS = FolderKind("a token corpus", MANIFEST, "scale-cpt token corpus 3")


class TokenizerRecord(BaseModel):
    """The tokenizer of a corpus.

    `backend` is the library that encoded: the checked fast encoder or the reference.
    """

    fingerprint: str
    vocab_size: PositiveInt
    document_start: list[int]
    document_end: list[int] = Field(min_length=1)
    backend: str


class InputFile(NamedTuple):
    """An input file.

    `sha256` is of its bytes on disk, of a very large file of some of its blocks.
    """

    path: str
    bytes: int
    sha256: str


def _plain_name(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError(f"names a shard outside the folder: {name!r}")
    return name


class ShardRecord(NamedTuple):
    """A shard: its name, and its files in the manifest's folder by the ends of their names.

    A tuple, as all of which there are many: each rank holds a corpus's 100,000 shards in memory.
    """

    name: Annotated[str, AfterValidator(_plain_name)]
    documents: NonNegativeInt
    tokens: NonNegativeInt
    files: dict[ShardFile, FileContent]


class SamplingRecord(BaseModel):
    """How a base model wrote a corpus.

    `base` holds the SHA-256 of its weight files, by their names.

    `tokens` were asked for; the others are settings of config.run.Sampling. `batch_size` documents
    were written at a time, which decides how sums are rounded, and so the text.
    """

    base: dict[str, str]
    tokens: int
    temperature: float
    max_tokens: int
    # Manifests of earlier versions call it by its second name.
    prompt_tokens: int | None = Field(
        validation_alias=AliasChoices("prompt_tokens", "opening_tokens")
    )
    chat_template: bool
    seed: int
    batch_size: int
    thinking: bool | None = None
    system_prompts: list[str] = []


class Description(BaseModel):
    """What a corpus is made of, without its inputs.

    The inputs of one that a base wrote (`sampling`) are prompts.
    """

    tokenizer: TokenizerRecord
    text_key: str
    prompt_key: str | None = None
    document: DocumentUnit = "line"
    chat_date: str | None = None
    """The date that the chat template was told is today's; None where it does not ask."""
    chat_template: str | None = None
    """The hash of the chat template that framed chats, and of that date."""
    encoding: str | None = None
    quoting: Quoting | None = None
    normalize: Normalization | None = None
    special_tokens: SpecialTokens | None = None
    """What a text that spells a special token became.

    None in corpora of earlier versions, which did not say.
    """
    heldout_fraction: float = 0.0
    heldout_by: HeldoutBy = "text"
    """Whose hash decides which documents are held out; `text` in corpora of earlier versions."""
    sampling: SamplingRecord | None = None


class Counts(BaseModel):
    """`characters` and `bytes` (UTF-8) are of the accepted text, prompts included.

    In a corpus with prompts, `prompt_tokens` and `prompt_bytes` are the prompts' share of `tokens`
    and `bytes`. `special_tokens_spelled`: how often a text spells a special token. `unknown_tokens`
    and `lost_characters` are what the tokenizer cannot spell. `decomposed_documents` are not in
    Unicode's NFC.
    """

    documents: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    characters: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    prompt_tokens: NonNegativeInt = 0
    prompt_bytes: NonNegativeInt = 0
    special_tokens_spelled: NonNegativeInt = 0
    unknown_tokens: NonNegativeInt = 0
    lost_characters: NonNegativeInt = 0
    decomposed_documents: NonNegativeInt = 0

    @property
    def unknown_fraction(self) -> float:
        """The share of the tokens, or of the characters, that the tokenizer cannot spell."""
        # A tokenizer with an unknown token drops no character, so that one of the two is 0.
        of_tokens = self.unknown_tokens / max(self.tokens, 1)
        return max(of_tokens, self.lost_characters / max(self.characters, 1))


class Manifest(Description, Counts):
    """The contents of `manifest.json`.

    They depend on the job alone, not on time, machine or workers.
    """

    # As in CORPUS: a Literal takes no variable.
    format: Literal["scale-cpt token corpus 3"] = "scale-cpt token corpus 3"
    part: str
    token_dtype: str
    tokens_per_character: float
    tokens_per_byte: float
    rejected: dict[str, int]
    inputs: list[InputFile]
    shards: list[ShardRecord]

    def save(self, folder: Path) -> None:
        """Publishes the manifest in `folder`, which completes the corpus."""
        write_record(folder / MANIFEST, self)


def load_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the corpus in `folder`.

    Raises:
        DataError: where it is missing or damaged, or the folder is of another kind.
    """
    path = folder / MANIFEST
    try:
        return read_record(path, Manifest, DataError, advice_for(folder))
    except FileNotFoundError:
        state = f"does not exist: start {MAKERS}"
        if folder.is_dir():
            state = f"is unfinished: start {MAKERS} again"
        raise DataError(f"{path}: no such file; the token corpus {folder} {state}") from None
    except DataError:
        found = other_kind(CORPUS, folder)
        if found is None:
            raise
        # Not the advice to remove it.
        raise DataError(
            f"{folder}: expected {CORPUS.name}, found {found}; name another folder"
        ) from None


def advice_for(folder: Path) -> str:
    return f"copy the corpus again, or remove the folder {folder} and start {MAKERS}"
