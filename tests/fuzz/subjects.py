"""What is damaged: what strangers bring (this file), what training leaves (trained.py), and run
folders."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import awkward  # noqa: F401  the fast encoder imports it when it is first used: every child would
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline.config.run import load_config
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.packing import PackedCorpus
from pipeline.data.tokenize.corpora import Job
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.unit_records import STATE
from pipeline.data.tokenize.workers import Workers, local_workers
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.errors import DataError
from pipeline.files.json_files import json_hash
from pipeline.methods.vocabulary import check_vocabulary
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base
from pipeline.parallel.topology import Layout
from studies.harness.study import load_study
from tests.bases import CONFIGS, STORIES, copy_tokenizer, random_model
from tests.data.helpers import COMPRESS, PROJECT, contents, job
from tests.fuzz import run_folders, trained
from tests.fuzz.runner import INPUT, Subject

_TEXTS = [
    f"Once upon a time there were {number} cats. 고양이 {'and a dog ' * (number % 7)}."
    for number in range(60)
]
_RECORDS = [{"text": text, "prompt": text[:20], "n": number} for number, text in enumerate(_TEXTS)]
_JSONL = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in _RECORDS)
_FILES = {
    "a.jsonl": _JSONL,
    "a.json": json.dumps(_RECORDS),
    "a.csv": "text,prompt\n" + "".join(f'"{text}",x\n' for text in _TEXTS),
    "a.txt": "\n".join(_TEXTS),
    **{f"a.jsonl{compression}": _JSONL for compression in COMPRESS if compression},
}
_CONFIGS: dict[str, Callable[[Path], object]] = {
    "configs/demo.yaml": lambda path: load_config(path).model_dump_json(),
    "configs/cpt_korean_llama3.2_1b.yaml": lambda path: load_config(path).model_dump_json(),
    "studies/configs/korean.yaml": lambda path: str(
        load_study(path, PROJECT / "examples" / "data")
    ),
    "ds_configs/zero1.json": lambda path: str(load_deepspeed_config(path, Layout(2, 1))),
}


def _make_corpus(name: str) -> None:
    INPUT.mkdir()
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(_RECORDS), INPUT / name, row_group_size=25)
    else:
        suffix = Path(name).suffix
        (INPUT / name).write_bytes(COMPRESS.get(suffix, COMPRESS[""])(_FILES[name].encode()))


def _tokenize(name: str) -> None:
    prompt_key = "prompt" if name in ("a.csv", "a.parquet") else None
    described = job(Path("tokens"), INPUT / name, prompt_key=prompt_key, unit_bytes=1000)
    # A worker as `scale-cpt tokenize` has it, which may die; forked from this process, which has
    # imported all.
    fork = multiprocessing.get_context("fork")
    with (
        patch.object(multiprocessing, "get_context", lambda _: fork),
        local_workers(1, isolated=True) as workers,
    ):
        preprocess(described, workers, max_bad_fraction=0.5)
    TokenCorpus(described.output).check()


def _make_finished(prompt_key: str | None) -> None:
    Path("a.jsonl").write_text(_JSONL)
    preprocess(
        job(INPUT / "tokens", "a.jsonl", prompt_key=prompt_key, unit_bytes=1500), Workers(None)
    )


def _unfinished() -> Job:
    return job(INPUT / "tokens", "a.jsonl", unit_bytes=1500, heldout_fraction=0.3)


def _make_unfinished() -> None:
    """What a job leaves when it ends before it publishes: here, because of a bad record."""
    INPUT.mkdir()
    Path("a.jsonl").write_text(_JSONL + '{"text": 7}\n')
    with contextlib.suppress(DataError):
        preprocess(_unfinished(), Workers(None), max_bad_fraction=0.0)
    assert (INPUT / "tokens" / STATE).is_dir()


def _continue_unfinished() -> dict[str, str]:
    """Continues the job; returns hashes of all files that it publishes, which are the same after
    any damage."""
    preprocess(_unfinished(), Workers(None), max_bad_fraction=1.0)
    return contents(INPUT / "tokens", INPUT / "tokens.heldout")


def _train_on() -> str:
    """Reads every sample as training does, after the check of its files; returns a hash of them."""
    corpus = TokenCorpus(
        INPUT / "tokens", tokenizer_fingerprint=load_tokenizer(STORIES).fingerprint
    )
    corpus.check(sampled=None)
    packed = PackedCorpus(corpus, 64, padding=0, document_mask=True, whole_documents=False)
    arrays = (array for at in range(len(packed)) for array in packed[at])
    return json_hash([np.asarray(array).tolist() for array in arrays])


def _make_base(kind: str) -> None:
    config = type(CONFIGS[kind]).from_dict({**CONFIGS[kind].to_dict(), "vocab_size": 512})
    random_model(config).save_pretrained(INPUT, max_shard_size="40KB" if kind == "llama" else "1GB")
    copy_tokenizer(INPUT)


def _read_base() -> None:
    base = open_base(INPUT)
    check_vocabulary(load_tokenizer(INPUT), base.spec)
    with torch.device("meta"):
        Decoder(base.spec)
    load_base(Decoder(base.spec), base)


def _make_config(source: str) -> None:
    INPUT.mkdir()
    shutil.copy(PROJECT / source, INPUT)


def _subjects() -> Iterator[Subject]:
    for name in (*_FILES, "a.parquet"):
        yield Subject("corpora", name, partial(_make_corpus, name), partial(_tokenize, name))
    for name, key in (("plain", None), ("prompts", "prompt")):
        make = partial(_make_finished, key)
        yield Subject("finished corpora", name, make, _train_on, exact=True)
    continuing = (_make_unfinished, _continue_unfinished)
    yield Subject("unfinished corpora", "tokenizing", *continuing, exact=True, guarded=True)
    for kind in ("llama", "phi3", "gemma3", "neox"):
        yield Subject("base folders", kind, partial(_make_base, kind), _read_base)
    for source, load in _CONFIGS.items():
        name = Path(source).name
        yield Subject(
            "configurations", name, partial(_make_config, source), partial(load, INPUT / name)
        )


# Corpora whose tokenization was interrupted are a target of their own: their subjects are added
# here.
SUBJECTS: list[Subject] = [*_subjects(), *trained.subjects(), *run_folders.subjects()]
"""All subjects; those of one target share a row of the table."""
