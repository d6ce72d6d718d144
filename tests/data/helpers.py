"""Small corpora and jobs."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import lzma
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import zstandard

from pipeline.config.data import Corpus
from pipeline.data.corpus.manifest import Manifest
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.sources.records import Keys, Record, Rejected
from pipeline.data.tokenize.corpora import Job
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenize.input_files import input_files
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.units import split_file, unit_records
from pipeline.data.tokenize.workers import local_workers
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from tests.texts import DATA, REVIEWS_HELDOUT, STORIES_HELDOUT

PROJECT = Path(__file__).parents[2]
CASES = PROJECT / "tests" / "cases"
"""Texts as people bring them: small files made after faults that users of other projects reported.
"""
STORIES260K = DATA / "models" / "stories260K"
TOOL = [sys.executable, "-m", "pipeline", "tokenize"]

COMPRESS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".xz": lzma.compress,
}


class Expected(NamedTuple):
    """How many documents a file gives, and what is said about it: of a rejected record, or as an
    error."""

    documents: int | None = None
    rejected: int = 0
    said: str = ""
    keys: Keys = Keys()


@cache
def stories_tokenizer() -> Tokenizer:
    return load_tokenizer(STORIES260K)


def documents(count: int, seed: int = 0, words: int = 30) -> list[str]:
    """Made-up texts in two scripts, all different."""
    choice = random.Random(seed)
    phrases = [
        "little",
        "Tom",
        "dogs",
        "ran home",
        "3.14",
        "한국어",
        "영화가",
        "정말",
        "재미있다",
        "ㅋㅋ",
        "\n",
        "…",
    ]
    return [
        f"{seed}-{number} " + " ".join(choice.choices(phrases, k=choice.randint(1, words)))
        for number in range(count)
    ]


def stories(count: int) -> list[str]:
    """Real English and Korean documents."""
    return [
        text
        for file in (STORIES_HELDOUT, REVIEWS_HELDOUT)
        for text in islice(texts([str(file)]), count)
    ]


def jsonl(texts: Iterable[object]) -> bytes:
    return b"".join(
        json.dumps({"id": 7, "text": text}, ensure_ascii=False).encode() + b"\n" for text in texts
    )


def write_jsonl(path: Path, texts: Iterable[object]) -> Path:
    path.write_bytes(COMPRESS["" if path.suffix == ".jsonl" else path.suffix](jsonl(texts)))
    return path


def job(output: Path, *inputs: Path | str, tokenizer: Path = STORIES260K, **settings: Any) -> Job:
    """`settings` are those of a corpus and of a job."""
    own = {
        name: settings.pop(name) for name in settings.keys() & {field.name for field in fields(Job)}
    }
    return Job(Corpus(input=[*map(str, inputs)], **settings), tokenizer, output, **own)


def tokenize(
    output: Path, *inputs: Path | str, max_bad_fraction: float = 1.0, **settings: Any
) -> Manifest:
    with local_workers(1) as workers:
        return preprocess(
            job(output, *inputs, **settings), workers, max_bad_fraction=max_bad_fraction
        )


def read(*files: Path, keys: Keys = Keys(), unit_bytes: int = 1000) -> list[Record]:  # noqa: B008
    """The records of files that are cut into units."""
    checked = input_files(list(map(str, files)))
    units = (unit for file in checked for unit in split_file(file, 0, keys, unit_bytes))
    return [record for unit in units for record in unit_records(unit, keys)]


def texts_of(*files: Path, keys: Keys = Keys(), unit_bytes: int = 10**9) -> list[str]:  # noqa: B008
    """The texts of these records, of rejected ones the reason."""
    records = read(*files, keys=keys, unit_bytes=unit_bytes)
    return [record.reason if isinstance(record, Rejected) else record.text for record in records]


def texts_in(folder: Path) -> list[str]:
    """The documents of a finished corpus as text, without the tokens around them."""
    corpus, tokenizer = TokenCorpus(folder), stories_tokenizer()
    found = []
    for number in range(corpus.manifest.documents):
        shard, document = corpus.locate_document(number)
        ids = shard.document(document)
        assert (ids[0], ids[-1]) == (1, 2)
        found.append(tokenizer.decode(ids[1:-1]))
    return found


def contents(*folders: Path) -> dict[str, str]:
    """A hash of every file below `folders`."""
    return {
        f"{folder.name}/{path.relative_to(folder)}": hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What scale-cpt tokenize does with `arguments`, in a process of its own."""
    return subprocess.run(
        [*TOOL, *map(str, arguments)], capture_output=True, text=True, cwd=PROJECT, check=False
    )


def pair_ids(
    prompt: str, answer: str, start: tuple[int, ...] = (1,)
) -> tuple[list[int], list[int]]:
    """The ids of a prompt, which are read, and of its answer, which are predicted.

    They are encoded together: the answer begins with the first token that reaches into it.
    """
    library = tokenizers.Tokenizer.from_file(str(STORIES260K / "tokenizer.json"))
    encoding = library.encode(prompt + answer, add_special_tokens=False)
    ends = [end for _, end in encoding.offsets]
    cut = next(at for at, end in enumerate(ends) if end > len(prompt))
    return [*start, *encoding.ids[:cut]], [*encoding.ids[cut:], 2]


def stored_pairs(folder: Path) -> list[tuple[list[int], list[int]]]:
    """The ids of the prompts and answers of a corpus."""
    corpus = TokenCorpus(folder)
    ids, prompts = corpus.read(0, corpus.tokens), corpus.prompt_mask(0, corpus.tokens)
    bounds = [*corpus.document_starts(0, corpus.tokens), corpus.tokens]
    spans = [slice(*bound) for bound in itertools.pairwise(bounds)]
    return [(list(ids[span][prompts[span]]), list(ids[span][~prompts[span]])) for span in spans]
