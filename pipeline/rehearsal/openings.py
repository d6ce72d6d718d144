"""Openings: the ids with which documents begin before the base writes on, chosen by the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline import log
from pipeline.config.data import Sampling
from pipeline.data.blend import Permutation
from pipeline.data.chats import ChatTemplate, chat_template
from pipeline.data.records import Keys
from pipeline.data.token_shards import Shard, ShardWriter, token_dtype, writing_shard
from pipeline.data.tokenizer import Tokenizer
from pipeline.data.units import good_documents, input_files
from pipeline.errors import DataError

# No tokenizer's token is longer, but for runs of spaces. More text than this is not encoded for a short opening.
_CHARACTERS_PER_TOKEN = 64
_logger = log.get_logger(__name__)
_Ids = npt.NDArray[Any]


def write_openings(
    prefix: Path, sampling: Sampling, text_key: str, *, base: Path, tokenizer: Tokenizer, longest: int
) -> ShardWriter:
    """Writes the openings' ids as the shard `prefix`; every opening has at most `longest`. Returns its writer, closed.

    Openings that are longer are left out. Reading ends with as many as `sampling.tokens` can need, equally many of each
    file.

    Raises:
        DataError: the files hold no opening that can be used, or the tokenizer has no chat template.
    """
    encode: Callable[[str], _Ids] = partial(_encoded, tokenizer, sampling.opening_tokens)
    if sampling.chat_template:
        encode = partial(_framed, chat_template(base), tokenizer)
    files = input_files(sampling.openings)
    too_long = 0
    with writing_shard(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for number, file in enumerate(files, start=1):
            for document in good_documents([str(file)], Keys(text_key)):
                ids = encode(document.text)
                if len(ids) > longest:
                    too_long += 1
                    continue
                writer.add(ids, np.array([len(ids)]))
                if writer.tokens >= sampling.tokens * number / len(files):
                    break
    where = ", ".join(sampling.openings)
    if writer.documents == 0:
        raise DataError(
            f"{where}: no opening can be used ({too_long} are longer than {longest} tokens); name other files or "
            f"another text_key than {text_key!r}, raise max_tokens, or set opening_tokens"
        )
    if too_long:
        _logger.warning("%s: left out %d openings of more than %d tokens", where, too_long, longest)
    return writer


def chosen_openings(prefix: Path, seed: int, first: int, stride: int) -> Iterator[_Ids]:
    """The openings number `first`, `first + stride`, … in an endless order of those in the shard `prefix`.

    The order is random passes over all of them, one after the other. So jobs of `stride` such sequences use each
    opening about equally often.
    """
    shard = Shard(prefix)
    number = first
    while True:
        a_pass, position = divmod(number, shard.documents)
        yield shard.document(Permutation(shard.documents, seed, a_pass)[position])
        number += stride


def _encoded(tokenizer: Tokenizer, opening_tokens: int | None, text: str) -> _Ids:
    """What precedes a document, and its first `opening_tokens` ids, or all."""
    beginning = text if opening_tokens is None else text[: opening_tokens * _CHARACTERS_PER_TOKEN]
    ids = tokenizer.reference.encode([beginning]).ids[:opening_tokens]
    return np.concatenate([np.array(tokenizer.before_document, dtype=np.int64), ids.astype(np.int64)])


def _framed(template: ChatTemplate, tokenizer: Tokenizer, text: str) -> _Ids:
    """A user's message in the chat template, up to where the answer begins."""
    return tokenizer.reference.encode([template.opened([{"role": "user", "content": text}])]).ids.astype(np.int64)
