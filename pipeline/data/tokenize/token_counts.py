"""How often each token occurs in the corpora of a run, and which are frequent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.config.data import Role
from pipeline.config.run import RunConfig
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.corpora import train_folder
from pipeline.data.tokenizer.extension.vocabulary import read_vocabulary
from pipeline.errors import ConfigError, DataError

_READ_TOKENS = 2**24
"""How many tokens are read at a time: 128 MiB."""


def frequent_tokens(
    config: RunConfig, vocab_size: int, min_count: int, *, setting: str, tokenizer_fingerprint: str
) -> tuple[int, ...]:
    """The base's ids that occur at least `min_count` times in the corpora of role new; `setting` is
    where that number comes from.

    Raises:
        ConfigError: no token is as frequent.
        DataError: as `token_counts`.
    """
    rows = vocab_size
    if config.vocabulary is not None:
        # New tokens have rows in any case. Their ids come after the base's.
        rows += len(read_vocabulary(config.vocabulary.folder).tokens)
    counts = token_counts(config, "new", rows, tokenizer_fingerprint=tokenizer_fingerprint)
    counts = counts[:vocab_size]
    frequent = np.flatnonzero(counts >= min_count)
    if not len(frequent):
        raise ConfigError(too_rare(setting, int(counts.max()), min_count))
    return tuple(frequent.tolist())


def too_rare(setting: str, highest: int, min_count: int) -> str:
    """Why no token is frequent enough; `highest` is how often the most frequent one occurs."""
    return (
        f"{setting}: expected at most {highest}, how often the most frequent token occurs, found "
        f"{min_count}"
    )


def token_counts(
    config: RunConfig, role: Role, vocab_size: int, *, tokenizer_fingerprint: str
) -> npt.NDArray[np.int64]:
    """How often each id occurs in the corpora of a role: [V], exactly.

    Raises:
        DataError: a corpus of that role is not tokenized yet, or by another tokenizer, or holds an
            id for which neither the base nor the run's vocabulary has a row.
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
