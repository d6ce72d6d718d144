"""No held-out document of a run is in a training part, whichever of the two is made first."""

from __future__ import annotations

import shutil
import unicodedata
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

from pipeline.config.data import Data
from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.tokenize import job
from pipeline.data.tokenize.corpora import corpus_jobs, is_heldout
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import local_workers
from pipeline.errors import DataError
from tests.data.helpers import (
    STORIES260K,
    documents,
    write_jsonl,
)

TEXTS = documents(60)


def made(folder: Path, **corpora: dict[str, Any]) -> Path:
    """The corpora of a run, whose files are named by their texts: "a.jsonl" of [TEXTS[0], …]."""
    for corpus in corpora.values():
        for key in ("input", "heldout_input"):
            if key in corpus:
                corpus[key] = [
                    str(write_jsonl(folder / name, texts)) for name, texts in corpus[key].items()
                ]
    data = Data.model_validate(
        {"folder": folder / "tokens", "sequence_length": 64, "corpora": corpora}
    )
    with local_workers(1) as workers:
        for one in corpus_jobs(data, STORIES260K):
            preprocess(one, workers)
    return data.folder


def test_a_document_of_heldout_files_is_named_in_any_training_part(tmp_path: Path):
    others = {"input": {"b.jsonl": TEXTS[20:40]}, "role": "replay"}
    corpus = {
        "input": {"a.jsonl": TEXTS[:20]},
        "heldout_input": {"held.jsonl": [*TEXTS[40:], TEXTS[33]]},
    }
    named = rf"b\.jsonl: the document '0-33 .* is also held out, in {tmp_path}/tokens/a\.heldout; leave it"
    with pytest.raises(DataError, match=named):
        made(tmp_path, a=dict(corpus), b=dict(others))
    assert not (tmp_path / "tokens" / "b" / "manifest.json").exists()
    shutil.rmtree(tmp_path / "tokens" / "a.heldout")
    tokens = made(tmp_path, a=corpus | {"heldout_input": {"held2.jsonl": TEXTS[40:]}}, b=others)
    assert [load_manifest(tokens / part).documents for part in ("a", "b", "a.heldout")] == [
        20,
        20,
        20,
    ]


@pytest.mark.parametrize("copy", ["{}\n", " {}", "{}  "])
def test_a_copy_that_differs_in_white_space_or_form_is_named(tmp_path: Path, copy: str):
    copied = copy.format(normalize("NFD", TEXTS[33]).replace(" ", "  "))
    corpus = {
        "input": {"a.jsonl": [*TEXTS[:20], copied]},
        "heldout_input": {"held.jsonl": TEXTS[30:40]},
    }
    with pytest.raises(
        DataError,
        match=rf"a\.jsonl: the document ' ?0-33 .* held out, in {tmp_path}/tokens/a\.heldout",
    ):
        made(tmp_path, a=corpus)


def test_a_copy_is_named_where_files_are_held_out_during_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Letters of training documents are hashed from their tokens where no part was held out before."""
    copied = TEXTS[33].replace(" ", "  ")
    texts = {"a.jsonl": [*TEXTS[:20], copied]}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(job, "compare_documents", killed)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path, a={"input": texts})
    state = tmp_path / "tokens" / "a" / ".units"
    assert not list(state.glob("*.letters.npy"))
    finished = (state / "00000-000000.json").stat().st_ino
    with pytest.raises(DataError, match=r"the document '0-33 .* is also held out"):
        made(tmp_path, a={"input": texts, "heldout_input": {"held.jsonl": TEXTS[30:40]}})
    assert (state / "00000-000000.json").stat().st_ino == finished


def test_files_held_out_later_are_compared_with_what_is_there(tmp_path: Path):
    texts = {"a.jsonl": TEXTS[:20]}
    made(tmp_path, a={"input": texts})
    with pytest.raises(
        DataError, match=rf"a\.jsonl: the document '0-7 .*held out, in {tmp_path}/tokens/a\.heldout"
    ):
        made(tmp_path, a={"input": texts, "heldout_input": {"held.jsonl": [*TEXTS[40:], TEXTS[7]]}})
    assert not (tmp_path / "tokens" / "a.heldout" / "manifest.json").exists()


def test_documents_of_a_share_are_held_out_of_two_corpora_or_named(tmp_path: Path):
    texts = {"a.jsonl": TEXTS}
    same = {"b.jsonl": TEXTS[:30]}
    made(
        tmp_path,
        a={"input": texts, "heldout_fraction": 0.5},
        b={"input": same, "heldout_fraction": 0.5},
    )
    with pytest.raises(DataError, match=r"c\.jsonl: .* is also held out, in .*/a\.heldout"):
        made(
            tmp_path,
            c={"input": {"c.jsonl": TEXTS[:30]}},
            a={"input": texts, "heldout_fraction": 0.5},
        )


def test_a_corpus_may_be_held_out_as_a_whole_to_see_whether_it_is_memorised(tmp_path: Path):
    texts = {"a.jsonl": TEXTS}
    tokens = made(tmp_path, a={"input": texts, "heldout_input": texts})
    assert (
        load_manifest(tokens / "a").documents == load_manifest(tokens / "a.heldout").documents == 60
    )


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_a_copy_that_differs_in_blanks_or_form_is_held_out_with_its_text(fraction: float):
    for text in [f"{number}번째 글, 다른 글" for number in range(50)]:
        copies = [
            f"{text}\n",
            text.replace(" ", "  "),
            f" {text}",
            unicodedata.normalize("NFD", text),
        ]
        assert {is_heldout(copy, fraction) for copy in copies} == {is_heldout(text, fraction)}
