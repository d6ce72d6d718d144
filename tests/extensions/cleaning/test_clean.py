"""A synthetic crawl is cleaned as is right, the same at any number of workers and after a stop; bad
settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor

from pipeline.commands import tokenize as tokenize_command
from pipeline.config.data import Corpus
from pipeline.config.run import load_config
from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.tokenize.corpora import heldout_corpora
from pipeline.errors import ConfigError, DataError, MissingPackageError, OutputError, UserError
from pipeline.extensions.cleaning import clean as module
from pipeline.extensions.cleaning import command as clean_command
from pipeline.extensions.cleaning.clean import clean, submit
from pipeline.extensions.cleaning.stages import CleaningJob
from studies.cleaning.crawl import Crawl, korean_pages
from tests.data.helpers import PROJECT, STORIES260K, contents, stories, write_jsonl
from tests.files import cut, flip_bit, read_jsonl
from tests.programs import call

COPIES = 5


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Crawl:
    crawl = Crawl(tmp_path_factory.mktemp("crawl") / "made", COPIES)
    given = contents(crawl.made)
    crawl.cleaned = clean(crawl.job, workers=1)
    assert contents(crawl.made).items() >= given.items()  # no input is changed
    return crawl


def test_every_kind_of_fault_is_treated_by_its_step(crawl: Crawl) -> None:
    # MinHash finds a near-copy with a probability that falls with the share of edited words.
    least = {"copy, 2 % edited": 0.5, "copy, 5 % edited": 0.0, "copy, 10 % edited": 0.0}
    wrong = {}
    for kind, row in crawl.rows().items():
        _, right_fraction, _ = row
        if right_fraction < least.get(kind, 0.8):
            wrong[kind] = row
    assert not wrong
    precisions = crawl.precision(crawl.cleaned)
    assert precisions.keys() >= {"language", "quality", "repetition", "duplicates", "contamination"}
    assert min(precision for _, precision in precisions.values()) >= 0.75, precisions


@pytest.mark.full
def test_a_task_cut_short_is_done_again_with_the_same_bytes(
    crawl: Crawl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Crawl(tmp_path / "made", COPIES)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_counts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            clean(again.job, workers=2)
    assert not again.job.output.exists()  # nothing that tokenization would take for the whole
    shard = again.job.work / "output" / "00001.jsonl.zst"
    shard.write_bytes(shard.read_bytes()[:100])
    (again.job.work / "logs" / "write" / "completions" / "00001").unlink()
    clean(again.job, workers=1)
    shards = {
        name: digest for name, digest in contents(again.job.output).items() if name.endswith(".zst")
    }
    assert len(shards) > 6
    assert shards.items() <= contents(crawl.job.output).items()
    assert not again.job.work.exists()


def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CleaningJob:
    """Cleaning that ended when all its tasks were done, but nothing was published."""
    job = Crawl(folder / "made", COPIES).job
    with monkeypatch.context() as patch:
        patch.setattr(module, "_counts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            clean(job, workers=1)
    return job


def test_tasks_whose_files_were_damaged_are_done_again(
    crawl: Crawl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of every stage, its statistics among them, each damaged in another way."""
    job = stopped(tmp_path, monkeypatch)
    shapes = (
        "filtered/*",
        "signatures/*/*",
        "references/*/*",
        "index/*/*",
        "pairs/*",
        "copies/*",
        "words/*",
    )
    shapes += ("output/*.zst", "output/dropped/*/*", "logs/*/stats/*.json", "logs/*/files/*.json")
    for number, shape in enumerate(shapes):
        damage = (Path.unlink, flip_bit, cut)[number % 3]
        damage(sorted(job.work.glob(shape))[-1])
    cleaned = clean(job, workers=1)
    stages = ("filter", "reference", "index", "buckets", "cluster", "words_heldout", "write")
    assert set(re.findall(r"task \d+ of (\w+) is done again", caplog.text)) == {*stages}
    assert cleaned.steps == crawl.cleaned.steps
    made = {name: digest for name, digest in contents(job.output).items() if name.endswith(".zst")}
    assert made == {
        name: digest for name, digest in contents(crawl.job.output).items() if name.endswith(".zst")
    }


def test_sound_tasks_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stopped(tmp_path, monkeypatch)
    monkeypatch.setattr(
        LocalPipelineExecutor, "_run_for_rank", lambda *_: pytest.fail("done again")
    )
    assert clean(job, workers=1).documents


@pytest.mark.full
def test_other_settings_are_refused(crawl: Crawl) -> None:
    job = crawl.job
    corpus = job.corpus.model_copy(
        update={"clean": job.corpus.clean.model_copy(update={"min_words": 30})}
    )
    with pytest.raises(
        DataError, match="other settings or inputs; set them back, or remove the folder"
    ):
        clean(replace(job, corpus=corpus), workers=1)


@pytest.mark.full
def test_a_folder_of_something_else_is_left(tmp_path: Path) -> None:
    job = Crawl(tmp_path / "made", 1).job
    for folder in (job.output, job.work):
        folder.mkdir()
        kept = folder / "thesis.txt"
        kept.write_text("mine")
        with pytest.raises(OutputError, match=f"{folder}: expected nothing here"):
            clean(job, workers=1)
        kept.rename(tmp_path / folder.name)
        folder.rmdir()


def run_of(folder: Path, texts: list[str], **settings: object) -> Path:
    """A run whose only corpus has a section `clean`."""
    corpus = {
        "input": [str(write_jsonl(folder / "in.jsonl", texts))],
        "heldout_fraction": 0.1,
        "clean": settings,
    }
    described = {
        "name": "t",
        "folder": str(folder / "run"),
        "base": str(STORIES260K),
        "method": {"name": "fft"},
        "data": {
            "folder": str(folder / "tokens"),
            "sequence_length": 64,
            "corpora": {"crawl": corpus},
        },
        "schedule": {
            "steps": 1,
            "global_batch_size": 1,
            "micro_batch_size": 1,
            "learning_rate": 0.1,
        },
        "deepspeed": str(PROJECT / "ds_configs" / "zero1.json"),
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(described))
    return path


@pytest.mark.full
def test_a_language_model_drops_other_languages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fasttext")

    def predict(_: object, doc: Document) -> tuple[tuple[str, float], dict[str, float]]:
        score = float(re.search("[가-힣]", doc.text) is not None)
        return ("ko", score), {"ko": score}

    monkeypatch.setattr("datatrove.utils.lid.FastTextLID.predict", predict)
    settings = {"language": "ko", "language_model": "ft176", "skip": ["language"]}
    korean = [*islice(korean_pages("reviews.jsonl.zst", 12), 5)]
    corpus = {
        "input": [str(write_jsonl(tmp_path / "x.jsonl", [*korean, *stories(3)[:3]]))],
        "clean": settings,
    }
    cleaned = clean(CleaningJob(Corpus.model_validate(corpus), tmp_path / "cleaned"), workers=1)
    assert cleaned.steps["language_model"] == {"dropped": 3, "total": 8}


@pytest.mark.full
def test_tokenization_reads_the_cleaned_text_and_nothing_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = stories(40)[:40]
    run = run_of(tmp_path, [*texts, *texts[:5], "too short"], language="en", skip=["lines"])
    with pytest.raises(DataError, match="crawl: has a section `clean`; run scale-cpt clean first"):
        call(tokenize_command, run, "--workers", 1)
    assert call(clean_command, run, "--workers", 1, "--dry-run") == 0
    assert "crawl.clean: about 87.0% of the documents, 40 in all" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "run.yaml"}
    for _ in range(2):  # the second time there is nothing to do
        assert call(clean_command, run, "--workers", 1) == 0
        assert "crawl.clean: 40 documents" in capsys.readouterr().out
    assert call(tokenize_command, run, "--workers", 1) == 0
    parts = [
        load_manifest(tmp_path / "tokens" / part).documents for part in ("crawl", "crawl.heldout")
    ]
    assert sum(parts) == 40
    heldout = [document.text for document in heldout_corpora(load_config(run))["crawl"]]
    assert len(heldout) == parts[1] > 0
    assert set(heldout) <= set(texts)
    call(clean_command, run, "--show", 1)
    assert "): too short" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"language": "xx"}, ConfigError, "crawl.clean.language: .*'ko' or 'en'"),
        (
            {"language": "ko", "shared_words": 0},
            ConfigError,
            "crawl.clean.shared_words: .*greater than",
        ),
        ({"language": "ko", "benchmarks": ["none.jsonl"]}, DataError, "none.jsonl: no such file"),
        ({"language": "ko"}, DataError, "no document is left: .*'language': {'dropped': 3"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    tmp_path: Path, settings: dict[str, object], kind: type[UserError], message: str
) -> None:
    with pytest.raises(kind, match=message) as refused:
        call(clean_command, run_of(tmp_path, stories(3)[:3], **settings), "--workers", 1)
    assert "\n" not in str(refused.value)


@pytest.mark.full
@pytest.mark.parametrize("missing", ["datatrove.executor", "ftfy"])
def test_without_the_extra_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("pipeline.extensions.cleaning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingPackageError, match=r"pip install 'scale-cpt\[clean\]'"):
        call(clean_command, run_of(tmp_path, ["text"], language="en"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("schedule.micro_batch_size=2", "micro_batch_size"),
        ("data.corpora.crawl.heldout_fraction=0", "heldout_input"),
    ],
)
def test_what_tokenization_would_refuse_is_refused_first(
    tmp_path: Path, change: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        call(clean_command, run_of(tmp_path, stories(3)[:3], language="en"), "--set", change)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.full
def test_a_failed_task_is_named_and_done_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, left = LocalPipelineExecutor._run_for_rank, [ValueError("bad luck")]

    def failing(executor: LocalPipelineExecutor, rank: int) -> None:
        if "buckets" in str(executor.logging_dir.path) and rank == 3 and left:
            raise left.pop()
        task(executor, rank)

    monkeypatch.setattr(LocalPipelineExecutor, "_run_for_rank", failing)
    job = Crawl(tmp_path / "made", 1).job
    with pytest.raises(
        DataError, match=r"buckets, task 3: ValueError: bad luck; .* says more; start again"
    ):
        clean(job, workers=1)
    assert clean(job, workers=1).documents


def check(*options: str | Path) -> str:
    command = [
        sys.executable,
        "-m",
        "studies.cleaning",
        "--copies",
        "2",
        *map(str, options),
    ]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout


@pytest.mark.full
def test_the_crawl_is_written_for_the_study(tmp_path: Path) -> None:
    check("--write", tmp_path / "texts" / "crawl.jsonl")
    texts = [record["text"] for record in read_jsonl(tmp_path / "texts" / "crawl.jsonl")]
    assert len(texts) == 2 * (10 + 19)
    assert sum("최저가 할인 쿠폰" in text for text in texts) == 2


def test_batch_scripts_of_a_folder_with_spaces_name_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sbatch and bash read them: the log of each array, and the program that its tasks load."""
    (folder := tmp_path / "two  words; and 'more'").mkdir()
    (programs := tmp_path / "bin").mkdir()
    sbatch = f'n=$(ls {tmp_path} | grep -c script); cp "${{@: -1}}" {tmp_path}/script.$n; echo Submitted batch job $n'
    for name, text in (
        ("sbatch", sbatch),
        ("srun", 'exec "${@: -2}"'),
        ("launch_pickled_pipeline", 'ls -d "$1"'),
    ):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    corpus = {
        "input": [str(write_jsonl(folder / "x.jsonl", stories(3)[:3]))],
        "clean": {"language": "en"},
    }
    job = CleaningJob(Corpus.model_validate(corpus), folder / "cleaned")
    submit(job, "cpu", "1:00")
    scripts = sorted(tmp_path.glob("script.*"))
    assert scripts
    for script in scripts:
        lines = [
            line for line in script.read_text().splitlines() if line.startswith("#SBATCH --output")
        ]
        [option] = shlex.split(lines[0].removeprefix("#SBATCH "))
        assert Path(option.partition("=")[2]).is_relative_to(job.work)
        ran = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True)
        pickled = Path(ran.stdout.splitlines()[-1])
        assert pickled.is_relative_to(job.work) and pickled.name == "executor.pik"
