"""What a folder of token shards holds. `manifest.json` is written last: a folder without one is unfinished.

It says nothing about when, where or by how many workers it was made: the same corpus gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import DataError
from pipeline.files import write_json

NAME = "manifest.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerRecord(_Part):
    """The tokenizer that made the ids; `backend` is the library that encoded: a checked fast path, or the reference."""

    fingerprint: str
    vocab_size: int
    document_start: list[int]
    document_end: list[int]
    backend: str


class InputFile(_Part):
    """A file that was read; `sha256` is of its bytes as they lie on the disk."""

    path: str
    bytes: int
    sha256: str


class ShardRecord(_Part):
    """A `.bin`/`.idx` pair in the manifest's folder."""

    name: str
    documents: int
    tokens: int


class Manifest(_Part):
    """The contents of `manifest.json`. `characters` and `bytes` (UTF-8) count the accepted text of this part.

    `prompt_tokens` and `prompt_bytes` say how much of `tokens` and `bytes` is prompts, in a corpus that has them
    (`prompt_key` is not None); then each shard has a third file, see `prompts.py`.
    """

    format: str = "scale-cpt token corpus 1"
    part: str
    tokenizer: TokenizerRecord
    token_dtype: str
    text_key: str
    prompt_key: str | None = None
    heldout_fraction: float
    documents: int
    tokens: int
    characters: int
    bytes: int
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    tokens_per_character: float
    tokens_per_byte: float
    rejected: dict[str, int]
    inputs: list[InputFile]
    shards: list[ShardRecord]

    def save(self, folder: Path) -> None:
        """Publishes the manifest in `folder`, which makes the corpus whole."""
        write_json(folder / NAME, self.model_dump())


def load_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the corpus in `folder`.

    Raises:
        DataError: there is none, or it is damaged.
    """
    path = folder / NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        state = "is unfinished: start tools/preprocess_data.py again" if folder.is_dir() else "does not exist"
        raise DataError(f"{path}: no such file; the token corpus {folder} {state}") from None
    except ValidationError as error:
        fault: Any = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "the file"
        raise DataError(f"{path}: not a manifest of this project: {where}: {fault['msg']}") from None
