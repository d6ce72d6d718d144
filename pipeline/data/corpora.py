"""The corpora of a run configuration: their folders, the jobs that make them, and their held-out documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config.data import Corpus, Data
from pipeline.config.run import RunConfig
from pipeline.data.records import Document
from pipeline.data.token_corpus import MANIFEST, SAMPLER, TOKENIZER, load_manifest
from pipeline.data.unit_work import Job, is_heldout, keys_of
from pipeline.data.units import good_documents, is_text
from pipeline.errors import DataError


def train_folder(data: Data, corpus: str) -> Path:
    """The folder of the training part of `corpus`."""
    return data.folder / corpus


def heldout_folder(data: Data, corpus: str) -> Path:
    """The folder of the held-out part of `corpus`, if it has one."""
    return data.folder / f"{corpus}.heldout"


def has_heldout(data: Data, corpus: str) -> bool:
    """Whether `corpus` has a held-out part."""
    described = data.corpora[corpus]
    return bool(described.heldout_input) or described.heldout_fraction > 0


def made_by(corpus: Corpus) -> str:
    """The tool that makes a corpus."""
    return TOKENIZER if corpus.sample is None else SAMPLER


def unfinished_corpora(data: Data) -> list[str]:
    """The corpora of a run that are not complete, their held-out parts included, in the order of the configuration."""
    parts = {
        name: [train_folder(data, name), *([heldout_folder(data, name)] if has_heldout(data, name) else [])]
        for name in data.corpora
    }
    return [name for name, folders in parts.items() if not all((folder / MANIFEST).exists() for folder in folders)]


def is_tokenized(data: Data) -> bool:
    """Whether every corpus of a run is complete."""
    return not unfinished_corpora(data)


def tokens_in(data: Data, name: str) -> int:
    """How many tokens the inputs of a finished corpus gave, those held out of them included."""
    folders = [train_folder(data, name), *([heldout_folder(data, name)] if data.corpora[name].heldout_fraction else [])]
    return sum(load_manifest(folder).tokens for folder in folders)


def named_inputs(data: Data) -> Iterator[Sequence[str]]:
    """The files and patterns that each part of each corpus is made from; of text that the base writes, its openings."""
    for corpus in data.corpora.values():
        openings = corpus.sample.openings if corpus.sample is not None else []
        yield from filter(None, (corpus.input, corpus.heldout_input, openings))


def corpus_jobs(data: Data, tokenizer: Path) -> Iterator[Job]:
    """The jobs that tokenize the corpora of a run, with the run's tokenizer."""
    for name, corpus in data.corpora.items():
        if corpus.sample is not None:
            continue
        job = Job(
            inputs=tuple(corpus.input),
            tokenizer=str(tokenizer),
            output=train_folder(data, name),
            text_key=corpus.text_key,
            prompt_key=corpus.prompt_key,
            document=corpus.document,
            messages_key=corpus.messages_key,
            encoding=corpus.encoding,
        )
        yield replace(job, heldout_fraction=corpus.heldout_fraction)
        if corpus.heldout_input:
            yield replace(job, inputs=tuple(corpus.heldout_input), output=heldout_folder(data, name), part="heldout")


def check_heldout(config: RunConfig) -> None:
    """Raises DataError where no corpus has held-out text, without which a run can be neither gated nor evaluated."""
    if not any(map(_has_heldout_text, config.data.corpora.values())):
        raise DataError(
            f"data.corpora of {config.name}: none has held-out text to score; name other files as heldout_input, or "
            "set heldout_fraction, such as 0.005, before the corpus is tokenized"
        )


def _has_heldout_text(corpus: Corpus) -> bool:
    heldout = corpus.heldout_input or (corpus.input if corpus.heldout_fraction else [])
    return bool(heldout) and is_text(heldout)


def heldout_corpora(config: RunConfig) -> dict[str, Iterator[Document]]:
    """The held-out documents of every corpus that has any as text, by the corpus's name.

    Raises:
        DataError: no corpus has any.
    """
    check_heldout(config)
    return {
        name: _documents(corpus, config.tokenizer)
        for name, corpus in config.data.corpora.items()
        if _has_heldout_text(corpus)
    }


def _documents(corpus: Corpus, tokenizer: Path) -> Iterator[Document]:
    keys = keys_of(corpus, tokenizer)
    if corpus.heldout_input:
        return good_documents(corpus.heldout_input, keys)
    documents = good_documents(corpus.input, keys)
    return (document for document in documents if is_heldout(document.held_out_by, corpus.heldout_fraction))
