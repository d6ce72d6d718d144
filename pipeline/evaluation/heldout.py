"""The texts of a run's corpora that it does not train on."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.data import Corpus
from pipeline.config.run import RunConfig
from pipeline.data.corpora import has_heldout
from pipeline.data.records import Document, Keys
from pipeline.data.tokenizer_training import good_documents
from pipeline.data.unit_work import is_heldout
from pipeline.errors import DataError


def heldout_corpora(config: RunConfig) -> dict[str, Iterator[Document]]:
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


def _documents(corpus: Corpus) -> Iterator[Document]:
    keys = Keys(corpus.text_key, corpus.prompt_key)
    if corpus.heldout_input:
        return good_documents(corpus.heldout_input, keys)
    documents = good_documents(corpus.input, keys)
    return (document for document in documents if is_heldout(document.whole_text, corpus.heldout_fraction))
