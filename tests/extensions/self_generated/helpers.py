"""Bases that can write, and small corpora of what they write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config.data import Sampling
from pipeline.data.corpus.manifest import Manifest
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.workers import local_workers
from pipeline.extensions.self_generated.corpus import SamplingJob, plan_of, sample_corpus
from pipeline.model.decoder import Decoder
from tests.bases import STORIES, copy_tokenizer, save_base
from tests.files import change_json

START, END, KNOWN_IDS = 1, 2, 512
"""Of the tokenizer of stories260K, which all these bases have."""
ROWS = 600
"""Of a random base's embedding: more than the tokenizer has ids."""


def copied_stories(folder: Path, **files: dict[str, Any]) -> Path:
    """stories260K in `folder`, with keys of its JSON files changed: `copied_stories(folder,
    config={"a": 1})`."""
    shutil.copytree(STORIES, folder)
    for name, changes in files.items():
        change_json(folder / f"{name}.json", **changes)
    return folder


def random_base(name: str, folder: Path) -> Path:
    """The random model `name` of `bases.CONFIGS` with the tokenizer of stories260K, or stories260K
    itself."""
    if name == "stories260K":
        return STORIES
    return copy_tokenizer(save_base(name, folder, vocab_size=ROWS))


def known_logits(decoder: Decoder, ids: np.ndarray) -> torch.Tensor:
    """The decoder's logits of the tokenizer's ids: [len(ids), KNOWN_IDS]."""
    return decoder.logits(torch.from_numpy(ids)[None])[0, :, :KNOWN_IDS]


def job(
    output: Path, base: Path = STORIES, *, max_tokens: int = 24, **settings: Any
) -> SamplingJob:
    own: dict[str, Any] = {"batch_size": 4}  # several units of few tokens
    own |= {
        name: settings.pop(name)
        for name in ("text_key", "batch_size", "messages_key", "chat_date")
        if name in settings
    }
    return SamplingJob(base, output, Sampling(**{"tokens": 600, **settings}), max_tokens, **own)


def sample(output: Path, base: Path = STORIES, *, workers: int = 1, **settings: Any) -> Manifest:
    described = job(output, base, **settings)
    with local_workers(workers, preload="pipeline.extensions.self_generated.corpus") as pool:
        return sample_corpus(described, plan_of(described), pool)


def documents_in(folder: Path) -> list[list[int]]:
    """The ids of every document of a finished corpus, whose shards are checked."""
    corpus = TokenCorpus(folder)
    corpus.check()
    ids = corpus.read(0, corpus.tokens)
    return [
        document.tolist()
        for document in np.split(ids, corpus.document_starts(0, corpus.tokens)[1:])
    ]
