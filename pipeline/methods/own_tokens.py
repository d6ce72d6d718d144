"""Which tokens get rows of their own: those that are frequent enough in the text to be learned."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.config.data import Role
from pipeline.config.method import Lora, OwnRows, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.corpora import train_folder
from pipeline.data.tokenizer.extension.vocabulary import read_vocabulary
from pipeline.errors import ConfigError, DataError

_READ_TOKENS = 2**24
"""How many tokens are read at a time: 128 MiB."""


def own_tokens_of(
    config: RunConfig, vocab_size: int, *, tokenizer_fingerprint: str
) -> tuple[int, ...] | None:
    """The ids that get rows of their own in the run; None for methods without own rows.

    Raises:
        ConfigError: no token is as frequent as `method.own_rows.min_count` asks.
        DataError: a corpus of role new is not tokenized yet, or by another tokenizer, or holds an
            id for which neither the base nor the run's vocabulary has a row.
    """
    method = config.method
    if not isinstance(method, (ScaleMethod, Lora)) or method.own_rows is None:
        return None
    if not isinstance(method.own_rows, OwnRows):
        return tuple(range(vocab_size))
    return frequent_tokens(
        config,
        vocab_size,
        method.own_rows.min_count,
        setting="method.own_rows.min_count",
        tokenizer_fingerprint=tokenizer_fingerprint,
    )


def frequent_tokens(
    config: RunConfig, vocab_size: int, min_count: int, *, setting: str, tokenizer_fingerprint: str
) -> tuple[int, ...]:
    """The base's ids that occur at least `min_count` times in the corpora of role new; `setting` is
    where that number comes from.

    Raises:
        ConfigError: no token is as frequent.
        DataError: as `own_tokens_of`.
    """
    rows = vocab_size
    if config.vocabulary is not None:
        # New tokens have rows in any case. Their ids come after the base's.
        rows += len(read_vocabulary(config.vocabulary.folder).tokens)
    counts = token_counts(config, "new", rows, tokenizer_fingerprint=tokenizer_fingerprint)
    counts = counts[:vocab_size]
    frequent = np.flatnonzero(counts >= min_count)
    if not len(frequent):
        raise ConfigError(
            f"{setting}: expected at most {counts.max()}, how often the most frequent token "
            f"occurs, found {min_count}"
        )
    return tuple(frequent.tolist())


def token_counts(
    config: RunConfig, role: Role, vocab_size: int, *, tokenizer_fingerprint: str
) -> npt.NDArray[np.int64]:
    """How often each id occurs in the corpora of a role: [V], exactly.

    Raises:
        DataError: as `own_tokens_of`.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for name, corpus in config.data.corpora.items():
        if corpus.role != role:
            continue
        folder = train_folder(config.data, name)
        tokens = TokenCorpus(folder, tokenizer_fingerprint=tokenizer_fingerprint)
        for start in range(0, tokens.tokens, _READ_TOKENS):
            ids = tokens.read(start, min(start + _READ_TOKENS, tokens.tokens))
            of_part = np.bincount(ids, minlength=vocab_size)
            if len(of_part) > vocab_size:
                raise DataError(
                    f"{folder}: holds the id {len(of_part) - 1}, and base and vocabulary have "
                    f"{vocab_size} rows; tokenize it with the run's tokenizer"
                )
            counts += of_part
    return counts
