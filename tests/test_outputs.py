"""Whatever a command finds where it is to write: only nothing, an empty folder or its own kind of
thing is replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import publish
from pipeline.checkpoint.manifest import CHECKPOINT
from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.data.corpus.manifest import CORPUS
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import local_workers
from pipeline.data.tokenizer.extension.vocabulary import (
    VOCABULARY,
    learn_extension,
    write_extension,
)
from pipeline.errors import OutputError, UserError
from pipeline.expansion_folder import EXPANSION, write_expansion
from pipeline.extensions.self_generated.corpus import plan_of, sample_corpus
from pipeline.files.folders import check_replaceable
from pipeline.gating.folder import GATE, write_gate
from pipeline.gating.gate import FittedGate
from pipeline.hf.folder_kinds import EXPORT
from pipeline.methods.scale import upscale
from pipeline.model.from_hf import open_base
from studies.biographies.make_texts import write_corpora
from studies.harness.random_base import make_random_base
from studies.harness.study import RandomBase
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, save, scale
from tests.data.helpers import contents, documents, job, stories, write_jsonl
from tests.distributed import run_ranks
from tests.extensions.gate.test_gate import RECORD
from tests.extensions.self_generated.helpers import job as sampling_job
from tests.programs import scale_cpt
from tests.widened import scale_settings

Writer = Callable[[Path], object]
WRITERS = (
    "export",
    "trained expansion",
    "expansion",
    "checkpoint",
    "gate",
    "vocabulary",
    "corpus",
    "sampled corpus",
    "biographies",
    "base",
    "new",
)
"""The folders that commands write. The last three replace no other."""
KINDS = (EXPORT, EXPANSION, CHECKPOINT, GATE, VOCABULARY, CORPUS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_folder_is_of_a_kind_by_the_format_in_its_record_of_any_version(tmp_path, kind):
    record = tmp_path / kind.record
    name_of_format, _, _ = kind.format.rpartition(" ")
    own = {"format": f"{name_of_format} 99", "more": 1}  # of a version that we do not know

    def refused() -> bool:
        before = contents(tmp_path)
        try:
            check_replaceable(tmp_path, kind)
        except OutputError:
            return contents(tmp_path) == before
        return False

    assert not refused(), "empty"
    (tmp_path / "weights").touch()
    assert refused(), "no record"
    record.write_text(json.dumps(own))
    assert not refused()
    for other in KINDS:
        if other.format != kind.format:
            record.write_text(json.dumps({"format": other.format}))
            assert refused(), other.name
    for text in ("", "[]", "{}", "7", "\0", json.dumps(own)[:-5], '{"format": "cargo 1"}'):
        record.write_text(text)
        assert refused(), text
    record.unlink()
    (tmp_path / f".{kind.record}.host.1.2.partial").write_text(json.dumps(own))
    assert refused(), "half-written"


@pytest.fixture(scope="module")
def writers(tmp_path_factory) -> Iterator[dict[str, Writer]]:
    """The work of each command that writes a folder, at its smallest."""
    inputs = tmp_path_factory.mktemp("inputs")
    run_ranks(save, 1, STORIES, scale("adapt", norm="base"), inputs / "saved")
    checkpoint = checkpoint_in(inputs / "saved")
    texts = write_jsonl(inputs / "texts.jsonl", documents(40))
    extension = learn_extension(STORIES, stories(30)[30:], stories(30)[:30], add=5, min_uses=2)
    gate = FittedGate(
        1, "token", torch.zeros(64), torch.ones(64), torch.ones(64), bias=0.0, threshold=0.0
    )
    architecture = inputs / "architecture.json"
    shutil.copy(STORIES / "config.json", architecture)

    with local_workers(1, preload="pipeline.extensions.self_generated.corpus") as workers:

        def write_export(path: Path) -> None:
            asked = Conversion(checkpoint, STORIES, path, format="merged")
            convert(asked, probe_maker({"own": [str(texts)]}))

        def write_trained_expansion(path: Path) -> None:
            asked = Conversion(checkpoint, STORIES, path, format="expansion")
            convert(asked, probe_maker({}))

        def write_initial_expansion(path: Path) -> None:
            upscale(scale_settings("preserve"), open_base(STORIES), path, 0)

        def save_checkpoint(path: Path) -> None:
            partial = path.with_name(f".{path.name}.partial")
            shutil.copytree(checkpoint, partial)
            publish(partial, path)

        def sample(path: Path) -> None:
            described = sampling_job(path, tokens=60)
            sample_corpus(described, plan_of(described), workers)

        def write_biographies(path: Path) -> None:
            write_corpora(path, 40, pool_fraction=0.05, seed=0, vocab_size=400)

        def write_base(path: Path) -> None:
            make_random_base(RandomBase(architecture=architecture, tokenizer=STORIES), path)

        yield {
            "export": write_export,
            "trained expansion": write_trained_expansion,
            "expansion": write_initial_expansion,
            "checkpoint": save_checkpoint,
            "gate": lambda path: write_gate(path, gate, RECORD),
            "vocabulary": lambda path: write_extension(extension, path, lambda _: None),
            "corpus": lambda path: preprocess(job(path, texts), workers),
            "sampled corpus": sample,
            "biographies": write_biographies,
            "base": write_base,
            "new": run_new,
        }


def run_new(path: Path) -> None:
    ended = scale_cpt("new", path)
    if ended.returncode:
        raise UserError(ended.stderr)


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_replaces_nothing_an_empty_folder_or_its_own_kind_alone(name, writers, tmp_path):
    write = writers[name]
    out = tmp_path / "out"
    write(out)
    made = names_in(out)
    try:
        write(out)
    except UserError:
        assert name in ("biographies", "base", "new")
    assert names_in(out) == made
    if name in ("export", "trained expansion", "expansion", "gate", "vocabulary"):
        link = tmp_path / "link"
        link.symlink_to(out)
        write(link)
        assert link.is_symlink()
        assert names_in(out) == made

    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert names_in(tmp_path / "empty") == made

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    before = contents(theirs)
    try:
        write(theirs)
    except UserError as error:
        assert "expected nothing here" in str(error)
        assert contents(theirs) == before
    else:
        (aside,) = tmp_path.glob("theirs.damaged")  # what is no checkpoint is set aside
        assert name == "checkpoint"
        assert names_in(aside) == {"thesis.txt"}
    assert not list(tmp_path.glob(".*")), "something half-written"


def test_a_heldout_part_is_not_mixed_with_other_files(tmp_path):
    (tmp_path / "out.heldout").mkdir()
    (tmp_path / "out.heldout" / "thesis.txt").write_text("years of work")
    texts = write_jsonl(tmp_path / "a.jsonl", documents(9))
    asked = job(tmp_path / "out", texts, heldout_fraction=0.2)
    with (
        local_workers(1) as workers,
        pytest.raises(OutputError, match=r"out\.heldout: expected nothing here"),
    ):
        preprocess(asked, workers)
    assert not (tmp_path / "out").exists()


def test_overwrite_replaces_what_it_names(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_text("not needed any more")
    with pytest.raises(
        OutputError, match="found another folder or file; move it away, or say --overwrite"
    ):
        write_expansion(tmp_path / "out", [], {}, overwrite=False)
    write_expansion(tmp_path / "out", [], {}, overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OutputError, match="file: expected nothing here"):
        write_expansion(tmp_path / "file", [], {}, overwrite=True)
