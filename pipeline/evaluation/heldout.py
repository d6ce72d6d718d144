"""The texts of a run's corpora that it does not train on."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import Corpus, RunConfig
from pipeline.data.corpora import has_heldout
from pipeline.data.tokenizer_training import texts
from pipeline.data.unit_work import is_heldout
from pipeline.errors import DataError


def heldout_corpora(config: RunConfig) -> dict[str, Iterator[str]]:
    """The held-out documents of every corpus that has some, by the corpus's name.

    Raises:
        DataError: none has.
    """
    found = {name: _documents(corpus) for name, corpus in config.data.corpora.items() if has_heldout(config.data, name)}
    if not found:
        raise DataError(
            f"data.corpora of {config.name}: none has a held-out part to score; set heldout_input or heldout_fraction"
        )
    return found


def _documents(corpus: Corpus) -> Iterator[str]:
    if corpus.heldout_input:
        return texts(corpus.heldout_input, text_key=corpus.text_key)
    documents = texts(corpus.input, text_key=corpus.text_key)
    return (text for text in documents if is_heldout(text, corpus.heldout_fraction))
