"""Whatever a command finds where it is to write: only nothing, an empty folder or its own kind of thing is replaced."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import publish
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.verify import probe_maker
from pipeline.data.preprocess import preprocess
from pipeline.data.vocabulary import learn_extension, write_extension
from pipeline.data.workers import Workers, local_workers
from pipeline.errors import OutputError, UserError
from pipeline.methods.scale import upscale
from pipeline.model.from_hf import open_base
from pipeline.rehearsal.corpus import plan_of, sample_corpus
from pipeline.scale.expansion import write_expansion
from pipeline.scale.gate import Gate
from pipeline.scale.gate_folder import write_gate
from pipeline.studies.random_base import make_random_base
from pipeline.studies.study import RandomBase
from studies.biographies.make_texts import write_corpora
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, save, scale
from tests.data.helpers import contents, documents, job, run_main, stories, write_jsonl
from tests.distributed import run_ranks
from tests.gating.test_gate import RECORD
from tests.rehearsal.helpers import job as sampling_job
from tests.widened import scale_settings

Writer = Callable[[Path], object]
FOREIGN = {
    "thesis": {"thesis.txt": "years of work"},
    "another manifest": {"manifest.json": '{"format": "cargo 1"}'},
    "a list": {"manifest.json": "[]", "conversion.json": "[1]", "gate.json": "7"},
    "no JSON": {"manifest.json": "{", "conversion.json": "{", "gate.json": "", "vocabulary.json": "\0"},
    "no format": dict.fromkeys(("manifest.json", "conversion.json", "gate.json", "vocabulary.json"), "{}"),
}
RECORDS = {
    "export": "conversion.json",
    "trained expansion": "manifest.json",
    "expansion": "manifest.json",
    "checkpoint": "manifest.json",
    "gate": "gate.json",
    "vocabulary": "vocabulary.json",
    "corpus": "manifest.json",
    "sampled corpus": "manifest.json",
    "biographies": None,
    "base": None,
    "new": None,
}
"""The folders that commands write, and the files by which they are known."""
DAMAGES = ("record cut", "record lost", "half-written", "other format")
SAME_KIND = {("expansion", "trained expansion"), ("trained expansion", "expansion")}


@pytest.fixture(scope="module")
def writers(tmp_path_factory) -> Iterator[dict[str, Writer]]:
    """The work of each command that writes a folder, at its smallest."""
    room = tmp_path_factory.mktemp("inputs")
    run_ranks(save, 1, STORIES, scale("adapt", norm="base"), room / "saved")
    checkpoint = checkpoint_in(room / "saved")
    texts = write_jsonl(room / "texts.jsonl", documents(40))
    extension = learn_extension(STORIES, stories(30)[30:], stories(30)[:30], add=5, min_uses=2)
    gate = Gate(1, "token", torch.zeros(64), torch.ones(64), torch.ones(64), bias=0.0, threshold=0.0)
    architecture = room / "architecture.json"
    shutil.copy(STORIES / "config.json", architecture)
    exported = Conversion(checkpoint, STORIES, Path())

    def save_checkpoint(path: Path) -> None:
        publish(Path(shutil.copytree(checkpoint, path.with_name(f".{path.name}.partial"))), path)

    def sample(path: Path, workers: Workers) -> None:
        described = sampling_job(path, tokens=60)
        sample_corpus(described, plan_of(described), workers, device="cpu")

    with local_workers(1, preload="pipeline.rehearsal.corpus") as workers:
        yield {
            "export": lambda path: convert(_into(exported, path, "stock"), probe_maker({"own": [str(texts)]})),
            "trained expansion": lambda path: convert(_into(exported, path, "expansion"), probe_maker({})),
            "expansion": lambda path: upscale(scale_settings("preserve"), open_base(STORIES), path, 0),
            "checkpoint": save_checkpoint,
            "gate": lambda path: write_gate(path, gate, RECORD),
            "vocabulary": lambda path: write_extension(extension, path, lambda _: None),
            "corpus": lambda path: preprocess(job(path, texts), workers),
            "sampled corpus": lambda path: sample(path, workers),
            "biographies": lambda path: write_corpora(path, 40, pool_fraction=0.05, seed=0, vocab_size=400),
            "base": lambda path: make_random_base(RandomBase(architecture=architecture, tokenizer=STORIES), path),
            "new": lambda path: run_new(path),
        }


def _into(conversion: Conversion, path: Path, format: str) -> Conversion:
    return Conversion(conversion.checkpoint, conversion.base, path, format=format)


def run_new(path: Path) -> None:
    ended = run_main("new_folder.py", path)
    if ended.returncode:
        raise UserError(ended.stderr)


@pytest.fixture(scope="module")
def folders(writers, tmp_path_factory) -> dict[str, Path]:
    """One folder of each kind, made by its writer, and some that are not ours."""
    room = tmp_path_factory.mktemp("folders")
    for name, write in writers.items():
        write(room / name)
    shutil.rmtree(room / "new" / "data")  # large
    for name, files in FOREIGN.items():
        (room / name).mkdir()
        for file, text in files.items():
            (room / name / file).write_text(text)
    return {name: room / name for name in (*writers, *FOREIGN)}


def cases(folders: dict[str, Path], own: str) -> Iterator[tuple[str, str, bool]]:
    """A folder by its name, what was done to it, and whether a link leads to it."""
    for held, damage in (("new", "empty"), ("new", "absent"), ("thesis", "whole"), (own, "whole")):
        yield held, damage, True
    yield from ((held, damage, False) for held, damage in (("new", "empty"), ("new", "absent")))
    for held in folders:
        yield held, "whole", False
        if RECORDS.get(held):
            yield from (
                (held, damage, False) for damage in ("record cut", "record lost", "half-written", "other format")
            )


def put(folder: Path, damage: str, path: Path) -> None:
    """Makes `path` a copy of `folder`, damaged."""
    if damage in ("empty", "absent"):
        path.mkdir()
        return None if damage == "empty" else path.rmdir()
    shutil.copytree(folder, path)
    if damage == "whole":
        return None
    record = path / str(RECORDS[folder.name])
    text = record.read_text()
    record.unlink()
    if damage == "record cut":
        record.write_text(text[: len(text) // 2])
    elif damage == "other format":
        record.write_text(json.dumps({**json.loads(text), "format": "scale-cpt other 1"}))
    elif damage == "half-written":
        (path / ".conversion.json.host.1.2.partial").write_text(text)
    return None


@pytest.mark.parametrize("own", RECORDS)
def test_a_writer_replaces_its_own_kind_alone(own, writers, folders, tmp_path):
    replaced = kept = 0
    for number, (held, damage, link) in enumerate(cases(folders, own)):
        what = f"{held}, {damage}{', through a link' if link else ''}"
        path = tmp_path / str(number) / "out"
        path.parent.mkdir()
        put(folders[held], damage, path.with_name("target") if link else path)
        if link:
            path.symlink_to("target")
        before = Counter(contents(path.parent).values())
        is_own = damage == "whole" and RECORDS[own] and (held == own or (held, own) in SAME_KIND)
        may_replace = is_own or damage in ("empty", "absent")
        try:
            writers[own](path)
        except UserError as error:
            assert not may_replace or damage == "absent", f"{what}: {error}"  # a link to nothing may be refused
            assert Counter(contents(path.parent).values()) == before, what
            kept += 1
        else:
            # What is no checkpoint is set aside, and what is just what was asked for stays.
            assert may_replace or before <= Counter(contents(path.parent).values()), what
            replaced += 1
        assert not link or path.is_symlink() or own == "checkpoint", what
        others = {found.name for found in path.parent.iterdir()} - {"out", "target", "latest"}
        assert all(".damaged" in name for name in others), what
    assert replaced >= 3 and (kept > 30 or own == "checkpoint")


def test_a_heldout_part_is_not_mixed_with_other_files(tmp_path):
    (tmp_path / "out.heldout").mkdir()
    (tmp_path / "out.heldout" / "thesis.txt").write_text("years of work")
    with local_workers(1) as workers, pytest.raises(OutputError, match=r"out\.heldout: expected nothing here"):
        preprocess(
            job(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", documents(9)), heldout_fraction=0.2), workers
        )
    assert not (tmp_path / "out").exists()


def test_overwrite_replaces_what_it_names(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_text("not needed any more")
    with pytest.raises(OutputError, match="found another folder or file; move it away, or say --overwrite"):
        write_expansion(tmp_path / "out", [], {}, overwrite=False)
    write_expansion(tmp_path / "out", [], {}, overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OutputError, match="file: expected nothing here"):
        write_expansion(tmp_path / "file", [], {}, overwrite=True)
