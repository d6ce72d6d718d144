"""What is damaged: corpora to tokenize, finished corpora, base folders, and configurations in YAML and JSON."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import awkward  # noqa: F401  the fast encoder imports it when it is first used: every child would
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.config.run import load_config
from pipeline.data.packing import PackedCorpus
from pipeline.data.preprocess import preprocess
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.unit_work import Job
from pipeline.data.workers import Workers, local_workers
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.methods.vocabulary import check_vocabulary
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base
from pipeline.parallel.topology import Layout
from pipeline.studies.study import load_study
from tests.bases import CONFIGS, random_model
from tests.data.helpers import COMPRESS
from tests.fuzz.damage import damage_bytes_only
from tests.fuzz.runner import INPUT, Subject, digest

TOKENIZER = Path("tokenizer")
_TEXTS = [f"Once upon a time there were {number} cats. 고양이 {'and a dog ' * (number % 7)}." for number in range(60)]
_RECORDS = [{"text": text, "prompt": text[:20], "n": number} for number, text in enumerate(_TEXTS)]
_JSONL = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in _RECORDS)
_PROJECT = Path(__file__).parents[2]


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


# Finished corpora


def _make_finished(prompt_key: str | None) -> None:
    make_tokenizer(TOKENIZER)
    Path("a.jsonl").write_text(_JSONL)
    job = Job(("a.jsonl",), str(TOKENIZER), INPUT / "tokens", prompt_key=prompt_key, unit_bytes=1500)
    preprocess(job, Workers(None))


def _train_on() -> dict[str, str]:
    """Reads every sample as training does, after the check of its files."""
    corpus = TokenCorpus(INPUT / "tokens", tokenizer_fingerprint=load_tokenizer(TOKENIZER).fingerprint)
    corpus.check(blocks=None)
    packed = PackedCorpus(corpus, 64, padding=0, document_mask=True, whole_documents=False)
    arrays = (array for at in range(len(packed)) for array in packed[at])
    return {"samples": digest(np.ascontiguousarray(array).tobytes() for array in arrays)}


# Base folders


def _make_base(kind: str, options: Mapping[str, Any]) -> None:
    make_tokenizer(INPUT)
    config = type(CONFIGS[kind]).from_dict({**CONFIGS[kind].to_dict(), "vocab_size": 320})
    random_model(config).save_pretrained(INPUT, **options)


def _read_base() -> None:
    base = open_base(INPUT)
    check_vocabulary(load_tokenizer(INPUT), base.spec)
    with torch.device("meta"):
        Decoder(base.spec)
    load_base(Decoder(base.spec), base)


# Configurations

_CONFIGS: dict[str, Callable[[Path], object]] = {
    "configs/demo.yaml": lambda path: load_config(path).model_dump_json(),
    "configs/cpt_korean_llama3.2_1b.yaml": lambda path: load_config(path).model_dump_json(),
    "configs/studies/korean.yaml": lambda path: load_study(path, _PROJECT / "data"),
    "ds_configs/zero1.json": lambda path: load_deepspeed_config(path, Layout(2, 1)),
}


def _make_config(source: str) -> None:
    INPUT.mkdir()
    shutil.copy(_PROJECT / source, INPUT)


def _load(source: str) -> None:
    _CONFIGS[source](INPUT / Path(source).name)


def _subjects() -> Iterator[Subject]:
    for name, compression in [(name, "") for name in _TEXT_FILES] + [("a.jsonl", end) for end in COMPRESS if end]:
        read = partial(_tokenize, f"{name}{compression}", "prompt" if name == "a.csv" else None)
        yield Subject("corpora", name + compression, partial(_make_texts, name, compression), read)
    for name in ("a.parquet", "saved"):
        yield Subject("corpora", name, partial(_make_tables, name), partial(_tokenize, name, "prompt"))
    for name, key in (("plain", None), ("prompts", "prompt")):
        make = partial(_make_finished, key)
        yield Subject("finished corpora", name, make, _train_on, exact=True, damage=damage_bytes_only)
    for kind in ("llama", "phi3", "gemma3", "neox"):
        options = {"max_shard_size": "40KB"} if kind == "llama" else {}
        yield Subject("base folders", kind, partial(_make_base, kind, options), _read_base)
    for name in _CONFIGS:
        yield Subject("configurations", Path(name).name, partial(_make_config, name), partial(_load, name))


SUBJECTS = list(_subjects())
