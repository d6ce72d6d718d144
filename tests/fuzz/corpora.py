"""Corpora to tokenize, the state of a killed tokenization, and finished corpora."""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import awkward  # noqa: F401  the fast encoder imports it when it is first used: every child would
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.data.packing import PackedCorpus
from pipeline.data.preprocess import preprocess
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.unit_work import Job
from pipeline.data.workers import Workers, local_workers
from tests.data.helpers import COMPRESS
from tests.fuzz.damage import damage_bytes_only
from tests.fuzz.subject import INPUT, Subject, digest

TOKENIZER = Path("tokenizer")
_TEXTS = [f"Once upon a time there were {number} cats. 고양이 {'and a dog ' * (number % 7)}." for number in range(60)]
_RECORDS = [{"text": text, "prompt": text[:20], "n": number} for number, text in enumerate(_TEXTS)]
_JSONL = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in _RECORDS)
_OUTPUT, _HELDOUT = INPUT / "tokens", INPUT / "tokens.heldout"


def make_tokenizer(folder: Path) -> None:
    """A small byte-level tokenizer with a token that ends documents."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    library.train_from_iterator(_TEXTS, trainer)
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


# Corpora to tokenize

_TEXT_FILES = {
    "a.jsonl": _JSONL,
    "a.json": json.dumps(_RECORDS),
    "a.csv": "text,prompt\n" + "".join(f'"{text}",x\n' for text in _TEXTS),
    "a.txt": "\n".join(_TEXTS),
}


def _make_texts(name: str, compression: str) -> None:
    make_tokenizer(TOKENIZER)
    INPUT.mkdir()
    (INPUT / f"{name}{compression}").write_bytes(COMPRESS[compression](_TEXT_FILES[name].encode()))


def _make_tables(name: str) -> None:
    make_tokenizer(TOKENIZER)
    INPUT.mkdir()
    if name == "saved":
        datasets.Dataset.from_list(_RECORDS).save_to_disk(INPUT / name)
    else:
        pq.write_table(pa.Table.from_pylist(_RECORDS), INPUT / name, row_group_size=25)


def _tokenize(name: str, prompt_key: str | None) -> dict[str, str]:
    job = Job((str(INPUT / name),), str(TOKENIZER), Path("tokens"), prompt_key=prompt_key, unit_bytes=1000)
    # A worker as tools/preprocess_data.py has it, which may die; forked from this process, which has imported all.
    fork = multiprocessing.get_context("fork")
    with patch.object(multiprocessing, "get_context", lambda _: fork), local_workers(1, isolated=True) as workers:
        preprocess(job, workers, max_bad_fraction=0.5)
    TokenCorpus(job.output).check()
    return {}


# The state of a killed tokenization, and finished corpora


class _KilledWorkers(Workers):
    """Dies after some tasks: two files to split, and units of work."""

    _left = 6

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any], **options: Any) -> Iterator[Any]:
        for result in super().run(function, tasks, **options):
            yield result
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


def _job(prompt_key: str | None, workers: Workers) -> dict[str, str]:
    """Makes the corpus, or ends its work; the tokens must be those of an undisturbed job, to the last byte."""
    inputs = ("texts/a.jsonl", "texts/b.jsonl.gz")
    job = Job(inputs, str(TOKENIZER), _OUTPUT, prompt_key=prompt_key, heldout_fraction=0.2, unit_bytes=1500)
    preprocess(job, workers, max_bad_fraction=0.5)
    made = (path for folder in (_OUTPUT, _HELDOUT) for path in sorted(folder.iterdir()))
    return {str(path): digest([path.read_bytes()]) for path in made if path.suffix in (".bin", ".idx", ".npy")}


def _make(prompt_key: str | None, workers: Workers) -> None:
    make_tokenizer(TOKENIZER)
    Path("texts").mkdir()
    Path("texts/a.jsonl").write_text(_JSONL[: len(_JSONL) // 2])
    Path("texts/b.jsonl.gz").write_bytes(gzip.compress(_JSONL[len(_JSONL) // 2 :].encode(), mtime=0))
    with contextlib.suppress(KeyboardInterrupt):
        _job(prompt_key, workers)


def _train_on() -> dict[str, str]:
    """Reads every sample as training does, after the check of its files."""
    found = {}
    for folder in (_OUTPUT, _HELDOUT):
        corpus = TokenCorpus(folder, tokenizer_fingerprint=load_tokenizer(TOKENIZER).fingerprint)
        corpus.check(blocks=None)
        packed = PackedCorpus(corpus, 64, padding=0, document_mask=True, whole_documents=False)
        parts = (np.ascontiguousarray(array).tobytes() for at in range(len(packed)) for array in packed[at])
        found[folder.name] = digest(parts)
    return found


def _subjects() -> Iterator[Subject]:
    for name, compression in [(name, "") for name in _TEXT_FILES] + [("a.jsonl", end) for end in COMPRESS if end]:
        read = partial(_tokenize, f"{name}{compression}", "prompt" if name == "a.csv" else None)
        yield Subject("corpora", name + compression, partial(_make_texts, name, compression), read)
    for name in ("a.parquet", "saved"):
        yield Subject("corpora", name, partial(_make_tables, name), partial(_tokenize, name, "prompt"))
    for name, key in (("plain", None), ("prompts", "prompt")):
        options: dict[str, Any] = {"exact": True, "damage": damage_bytes_only}
        resume = partial(_job, key, Workers(None))
        # What a killed job left is trusted, so that damage to it is seen by no reader before the corpus is checked.
        yield Subject("unit state", name, partial(_make, key, _KilledWorkers(None)), resume, damage=damage_bytes_only)
        finished = partial(_make, key, Workers(None))
        yield Subject("finished corpora", f"{name}, again", finished, resume, **options)
        yield Subject("finished corpora", f"{name}, train", finished, _train_on, **options)


SUBJECTS = list(_subjects())
