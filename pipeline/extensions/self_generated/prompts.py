"""Prompts: the ids with which documents begin before the base writes on, chosen by the seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline import log
from pipeline.config.data import Sampling
from pipeline.data.corpus.indexed_dataset import (
    FileContent,
    Shard,
    ShardFile,
    token_dtype,
    writing_shard,
)
from pipeline.data.dataset.blend import Permutation
from pipeline.data.sources.records import Document, Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenize.input_files import input_files
from pipeline.data.tokenizer.chats import ChatTemplate
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.errors import DataError

# No tokenizer's token is longer, but for runs of spaces. More text than this is not encoded for a
# short prompt.
_CHARACTERS_PER_TOKEN = 64
_logger = log.get_logger(__name__)
_Ids = npt.NDArray[Any]


def write_prompts(
    prefix: Path,
    sampling: Sampling,
    keys: Keys,
    template: ChatTemplate | None,
    *,
    base: Path,
    longest: int,
) -> dict[ShardFile, FileContent]:
    """Writes the prompts' ids as the shard `prefix`.

    As many as `sampling.tokens` can need, equally many of each file.

    Of chats a prompt is what precedes an answer, one for each message of the assistant, with all
    earlier turns. Other prompts are a user's messages, framed by `template`, if one is given. Those
    of more than `longest` ids are left out. Returns what the shard's files hold.

    Raises:
        DataError: the files hold no prompt that can be used, or the tokenizer has no chat template.
    """
    tokenizer = load_tokenizer(base)
    files = input_files(sampling.prompts)
    too_long = 0
    with writing_shard(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for number, file in enumerate(files, start=1):
            # Documents hold their prompts: `sampling.tokens` ids of prompts are as many as can be
            # needed.
            enough = sampling.tokens * number / len(files)
            for document in good_documents([str(file)], keys):
                ids = _prompt_ids(document, tokenizer, template, sampling.prompt_tokens)
                if len(ids) > longest:
                    too_long += 1
                    continue
                writer.add(ids, np.array([len(ids)]))
                if writer.tokens >= enough:
                    break
    where = ", ".join(sampling.prompts)
    if writer.documents == 0:
        raise DataError(
            f"{where}: no prompt can be used ({too_long} are longer than {longest} tokens); name "
            f"other files or another key than {keys.text!r}, raise max_tokens, or set prompt_tokens"
        )
    if too_long:
        _logger.warning("%s: left out %d prompts of more than %d tokens", where, too_long, longest)
    return writer.files


def _prompt_ids(
    document: Document, tokenizer: Tokenizer, template: ChatTemplate | None, limit: int | None
) -> _Ids:
    """The ids with which the base begins a document.

    Of a text these are what precedes a document, and `limit` tokens of it (None: all).
    """
    if document.prompt is not None:
        # A chat, framed up to where the answer begins.
        asked = (document.start or "") + document.prompt
        return np.array(ids_of(tokenizer, asked, control=document.has_control))
    if template is not None:
        question = template.opened([{"role": "user", "content": document.text}])
        return tokenizer.reference.encode([question]).ids
    beginning = document.text
    if limit is not None:
        beginning = beginning[: limit * _CHARACTERS_PER_TOKEN]
    return np.concatenate([tokenizer.before_document, ids_of(tokenizer, beginning)[:limit]])


def chosen_prompts(prefix: Path, seed: int, first: int, stride: int) -> Iterator[_Ids]:
    """The prompts number `first`, `first + stride`, … of the shard `prefix`, without end.

    Each pass over all of them has a random order.
    """
    shard = Shard(prefix)
    number = first
    while True:
        # Units take turns: unit k of n takes the k-th prompt of every n.
        a_pass, position = divmod(number, shard.documents)
        yield shard.document(Permutation(shard.documents, seed, a_pass)[position])
        number += stride
