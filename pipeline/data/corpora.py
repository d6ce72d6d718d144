"""The token corpora that a run configuration names: which there are, where they lie, and the jobs that make them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.config.data import Data
from pipeline.data import manifest
from pipeline.data.unit_work import Job


def train_folder(data: Data, corpus: str) -> Path:
    """Where the training part of `corpus` lies."""
    return data.folder / corpus


def heldout_folder(data: Data, corpus: str) -> Path:
    """Where the held-out part of `corpus` lies, if it has one."""
    return data.folder / f"{corpus}.heldout"


def has_heldout(data: Data, corpus: str) -> bool:
    """Whether `corpus` has a held-out part."""
    described = data.corpora[corpus]
    return bool(described.heldout_input) or described.heldout_fraction > 0


def is_tokenized(data: Data) -> bool:
    """Whether every corpus of a run is whole, with its held-out part where it has one."""
    folders = [train_folder(data, name) for name in data.corpora]
    folders += [heldout_folder(data, name) for name in data.corpora if has_heldout(data, name)]
    return all((folder / manifest.NAME).exists() for folder in folders)


def corpus_jobs(data: Data, tokenizer: Path) -> Iterator[Job]:
    """The jobs that make all corpora of a run, with the base model's own tokenizer."""
    for name, corpus in data.corpora.items():
        yield Job(
            inputs=tuple(corpus.input),
            tokenizer=str(tokenizer),
            output=train_folder(data, name),
            text_key=corpus.text_key,
            prompt_key=corpus.prompt_key,
            heldout_fraction=corpus.heldout_fraction,
        )
        if corpus.heldout_input:
            yield Job(
                inputs=tuple(corpus.heldout_input),
                tokenizer=str(tokenizer),
                output=heldout_folder(data, name),
                part="heldout",
                text_key=corpus.text_key,
                prompt_key=corpus.prompt_key,
            )
