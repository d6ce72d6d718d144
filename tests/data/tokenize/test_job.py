"""A corpus depends on its job alone: not on the workers, how often they were killed, or their
order."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.tokenize import unit_documents
from pipeline.data.tokenize.corpora import is_heldout
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.unit_records import QUARANTINE
from pipeline.data.tokenize.workers import Workers, local_workers
from pipeline.data.tokenizer.encoders import Encoded, GigatokenEncoder
from pipeline.errors import TRANSIENT_FAULT, DataError
from pipeline.files.disk_space import held_bytes
from pipeline.files.hashes import file_hash
from tests.data.helpers import (
    PROJECT,
    STORIES260K,
    TOOL,
    contents,
    documents,
    job,
    jsonl,
    texts_in,
    tokenize,
    write_jsonl,
)  # fmt: skip
from tests.disks import NO_HARD_LINKS, NO_SAFE_RENAME, SmallDisk, refuse_calls
from tests.files import read_jsonl
from tests.programs import scale_cpt
from tests.texts import REVIEWS, STORIES
from tests.training.runs import write_config
from tests.waiting import PATIENCE_S

# 50 units of a quarter MiB, from two compressed files: enough that none is finished before it is
# killed.
INPUTS = (REVIEWS, STORIES)
SETTINGS: dict[str, Any] = {"heldout_fraction": 0.1, "unit_bytes": 2**18}
ARGUMENTS = [
    "--input",
    *INPUTS,
    "--tokenizer",
    STORIES260K,
    "--heldout-fraction",
    "0.1",
    "--unit-mib",
    "0.25",
]
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n")


@pytest.fixture(scope="module")
def undisturbed(module_folder: Path) -> dict[str, str]:
    """The corpus of one process that nothing interrupts."""
    tokenize(module_folder / "corpus", *INPUTS, **SETTINGS)
    made = corpus_contents(module_folder / "corpus")
    assert len(made) > 150
    return made


def corpus_contents(folder: Path) -> dict[str, str]:
    return contents(folder, folder.with_name("corpus.heldout"))


class Running:
    """The tool in the background, in a process group of its own."""

    def __init__(self, output: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> None:
        command = [*launcher, *TOOL, *map(str, ARGUMENTS), "--output", str(output), *arguments]
        self.output = output
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=PROJECT, start_new_session=True, **piped)

    def wait_for_units(self, more: int) -> None:
        """Waits until `more` units are done."""
        wanted = self.units_done() + more
        while self.units_done() < wanted:
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.002)

    def units_done(self) -> int:
        return len(list((self.output / ".units").glob("*-*[0-9].json")))

    def end(self, number: int) -> str:
        """Sends a signal to the whole process group; what the tool wrote to stderr."""
        os.killpg(self.process.pid, number)
        return self.errors()

    def errors(self) -> str:
        _, errors = self.process.communicate()
        assert "Traceback" not in errors
        assert not (self.output / "manifest.json").exists()
        return errors

    def finish(self) -> None:
        _, errors = self.process.communicate()
        assert self.process.returncode == 0, errors


def test_killed_at_random_moments(tmp_path: Path, undisturbed: dict[str, str]):
    """By Ctrl-C; all processes at once; the parent alone; one worker. Then finished by one process."""
    chance = random.Random(7)
    output = tmp_path / "corpus"

    early = Running(output, "--workers", "2")
    early.wait_for_units(2)
    assert early.end(signal.SIGINT).rstrip().endswith("interrupted")
    assert early.process.returncode == 130 and not list(output.rglob("*.partial"))

    whole = Running(output, "--workers", "2")
    whole.wait_for_units(chance.randint(1, 8))
    whole.end(signal.SIGKILL)

    parent = Running(output, "--workers", "3")
    parent.wait_for_units(chance.randint(1, 8))
    descendants = psutil.Process(parent.process.pid).children(recursive=True)
    assert len(descendants) >= 4  # the fork server, which needs a tracker, and three workers
    parent.process.kill()
    parent.errors()
    assert not psutil.wait_procs(descendants, timeout=PATIENCE_S)[
        1
    ]  # no worker outlives its parent

    worker = Running(output, "--workers", "2")
    worker.wait_for_units(chance.randint(1, 8))
    # The workers are children of the fork server, which is a child of the job's own process.
    workers = [
        child
        for server in psutil.Process(worker.process.pid).children()
        for child in server.children()
    ]
    chance.choice(workers).kill()
    errors = worker.errors()
    assert worker.process.returncode == 1
    assert "error: a worker process was killed" in errors

    Running(output, "--workers", "1").finish()
    assert corpus_contents(output) == undisturbed


@pytest.mark.parametrize(
    "refusals", [NO_HARD_LINKS, NO_SAFE_RENAME], ids=["no links", "rename only"]
)
def test_a_file_system_without_hard_links_holds_the_same_corpus(
    tmp_path: Path, refusals: dict[str, int]
):
    text = write_jsonl(tmp_path / "text.jsonl", documents(20))
    tokenize(tmp_path / "ordinary" / "corpus", text)
    output = tmp_path / "other" / "corpus"
    if (child := os.fork()) == 0:
        try:
            refuse_calls(refusals)
            tokenize(output, text)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert contents(output) == contents(tmp_path / "ordinary" / "corpus")


def test_one_share_finishes_alone_and_all_together_agree(
    tmp_path: Path, undisturbed: dict[str, str]
):
    """As in a job array: three shares at the same time, of which one dies; then one share alone."""
    together = [
        Running(tmp_path / "a" / "corpus", "--workers", "1", "--share", f"{k}/3") for k in range(3)
    ]
    together[1].wait_for_units(4)
    os.killpg(together[1].process.pid, signal.SIGKILL)
    for survivor in (together[0], together[2]):
        survivor.finish()
    together[1].process.communicate()
    assert corpus_contents(tmp_path / "a" / "corpus") == undisturbed
    preprocess(job(tmp_path / "b" / "corpus", *INPUTS, **SETTINGS), Workers(None), share=(2, 3))
    assert corpus_contents(tmp_path / "b" / "corpus") == undisturbed


@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="NO MPI ON THIS MACHINE: MPI was not tested (make slurm)"
)
def test_over_mpi_ranks_killed_once(tmp_path: Path, undisturbed: dict[str, str]):
    running = Running(tmp_path / "corpus", "--mpi", launcher=(*MPIRUN, "3"))
    running.wait_for_units(3)
    running.end(signal.SIGKILL)
    Running(tmp_path / "corpus", "--mpi", launcher=(*MPIRUN, "2")).finish()
    assert corpus_contents(tmp_path / "corpus") == undisturbed


def test_a_machine_without_mpi_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so"))
    done = scale_cpt("tokenize", *ARGUMENTS, "--output", tmp_path / "out", "--mpi")
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "--mpi: this machine has no MPI (" in line and line.endswith(
        "use a job array, which needs neither"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="NO MPI ON THIS MACHINE: MPI was not tested (make slurm)"
)
def test_mpi_without_a_launcher_inside_an_allocation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    done = scale_cpt("tokenize", *ARGUMENTS, "--output", tmp_path / "out", "--mpi")
    assert done.returncode == 1
    assert "error: --mpi: expected 4 ranks, as Slurm allocated, found 1" in done.stderr


def test_the_task_at_which_a_process_aborts_is_named():
    wait, abort = (
        "__import__('time').sleep(600)",
        "[__import__('time').sleep(0.2), __import__('os').abort()]",
    )
    for tasks, named in (([wait, abort], f"{wait} or {abort}"), ([abort], abort)):
        with (
            local_workers(len(tasks), isolated=True) as workers,
            pytest.raises(
                DataError, match=re.escape(f"a worker process was killed at {named}; start")
            ),
        ):
            list(workers.run(eval, tasks))


@pytest.mark.parametrize("finished", [True, False])
def test_a_different_job_cannot_continue_in_the_same_folder(tmp_path: Path, finished: bool):
    source, output = write_jsonl(tmp_path / "x.jsonl", [*documents(20), 7]), tmp_path / "corpus"
    with nullcontext() if finished else pytest.raises(DataError, match="bad"):
        tokenize(output, source, max_bad_fraction=float(finished))
    before = contents(output)
    for name, change in {
        "another text key": {"text_key": "body"},
        "another heldout fraction": {"heldout_fraction": 0.5},
        "another document end": {"end_of_document": "<unk>"},
        "other files": {},
    }.items():
        if not change:
            write_jsonl(source, documents(30))
        with pytest.raises(
            DataError,
            match=f"begun with {name}: expected .*, found .*; set it back, or remov",
        ):
            tokenize(output, source, **change)
    assert contents(output) == before


def test_the_manifest_and_the_documents_held_out_by_their_hash(tmp_path: Path):
    texts = documents(400)
    first = write_jsonl(tmp_path / "a.jsonl.gz", [*texts[:200], 5])
    made = tokenize(
        tmp_path / "corpus",
        first,
        write_jsonl(tmp_path / "b.jsonl", [*texts[200:], *texts[:2]]),
        heldout_fraction=0.2,
    )
    train, held = texts_in(tmp_path / "corpus"), texts_in(tmp_path / "corpus.heldout")
    assert sorted(train + held) == sorted([*texts, *texts[:2]]) and not set(train) & set(held)
    assert 50 < len(held) < 110 and all(is_heldout(text, 0.2) for text in held)
    assert all(is_heldout(text, 0.3) for text in held), (
        "a larger fraction only adds to a smaller one"
    )
    heldout = load_manifest(tmp_path / "corpus.heldout")
    for part, name, texts in ((made, "train", train), (heldout, "heldout", held)):
        assert (part.part, part.documents, part.characters) == (
            name,
            len(texts),
            sum(map(len, texts)),
        )
        assert part.bytes == sum(len(text.encode()) for text in texts)
        assert part.rejected == {"text_not_string": 1}
    assert made.tokens_per_character == pytest.approx(made.tokens / made.characters, abs=1e-6)
    file = made.inputs[0]
    assert (file.path, file.bytes, file.sha256) == (
        str(first),
        first.stat().st_size,
        file_hash(first),
    )
    assert (made.tokenizer.backend, made.tokenizer.vocab_size, made.token_dtype) == (
        "gigatoken",
        512,
        "uint16",
    )
    assert not (tmp_path / "corpus" / ".units").exists()


def test_a_wrong_fast_encoder_is_named_and_the_reference_makes_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = write_jsonl(tmp_path / "x.jsonl", [*documents(60), "거짓 하나"])
    original = GigatokenEncoder.encode

    def erring(self: GigatokenEncoder, texts: list[str], utf8: object = None) -> Encoded:
        encoded = original(self, texts)
        return Encoded(encoded.ids + any("거짓" in text for text in texts), encoded.lengths)

    monkeypatch.setattr(GigatokenEncoder, "encode", erring)
    monkeypatch.setattr(unit_documents, "_BATCH_BYTES", 1)  # each document is compared
    output = tmp_path / "corpus"
    with pytest.raises(
        DataError,
        match=f"gigatoken and tokenizers differ on '거짓 하나'; remove {output} and start",
    ):
        tokenize(output, source)
    with pytest.raises(DataError, match="was begun with another backend"):
        tokenize(output, source, reference_only=True)
    shutil.rmtree(output)
    assert tokenize(output, source, reference_only=True).tokenizer.backend == "tokenizers"
    assert tokenize(output, source) == load_manifest(output), (
        "either encoder may have made a finished corpus"
    )


def test_memory_follows_neither_the_corpus_nor_a_document_that_is_too_large(tmp_path: Path):
    """Four times the text takes the same memory; a document of 200 MB costs itself alone."""
    content = jsonl(documents(3000, words=200))
    code = (
        "import sys; from tests.data.helpers import tokenize; from pathlib import Path\n"
        "made = tokenize(Path(sys.argv[1] + '.out'), sys.argv[1])\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(made.documents, dict(made.rejected), peak.split()[1], sep=';')"
    )

    def made(name: str, content: bytes) -> tuple[str, str, float]:
        (path := tmp_path / name).write_bytes(content)
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
        )
        count, rejected, peak_kib = done.stdout.split(";")
        return count, rejected, int(peak_kib) / 1024

    small, large = made("small.jsonl", content * 4), made("large.jsonl", content * 16)
    assert large[2] < small[2] + 20
    huge = made(
        "huge.jsonl",
        jsonl(["first"]) + b'{"text": "' + b"a" * 200_000_000 + b'"}\n' + jsonl(["last"]),
    )
    assert huge[:2] == ("2", "{'too_large': 1}") and huge[2] < 500


def test_every_corpus_of_a_configuration(tmp_path: Path):
    korean, english, heldout = (
        write_jsonl(tmp_path / f"{n}.jsonl", documents(30, n)) for n in range(3)
    )
    corpora = {
        "korean": {"input": [str(korean)], "heldout_fraction": 0.3},
        "english": {"input": [str(english)], "heldout_input": [str(heldout)], "role": "replay"},
    }
    path, tokens = (
        write_config(tmp_path / "run", tmp_path / "tokens", data__corpora=corpora),
        tmp_path / "tokens",
    )
    tool = ("tokenize", path, "--workers", "1")
    heldout.rename(tmp_path / "later")
    early = scale_cpt(*tool)
    assert early.returncode == 1 and early.stderr.count("error: ") == 1
    assert "2.jsonl: no such file" in early.stderr.splitlines()[-1]
    assert not tokens.exists()  # the file of the last job is looked for before the first job
    (tmp_path / "later").rename(heldout)
    done = scale_cpt(*tool)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tokens.iterdir()} == {
        "english",
        "english.heldout",
        "korean",
        "korean.heldout",
    }
    assert load_manifest(tokens / "english.heldout").part == "heldout"
    assert texts_in(tokens / "english.heldout") == documents(30, seed=2)
    made = {path: path.stat().st_mtime_ns for path in tokens.rglob("*")}
    assert scale_cpt(*tool).stderr.count("already complete") == 3
    assert {path: path.stat().st_mtime_ns for path in tokens.rglob("*")} == made


def test_a_full_disk_gives_a_one_line_error_and_no_damage(small_disk: Callable[..., SmallDisk]):
    disk = small_disk(mib=1)
    output = disk.path / "corpus"
    done = scale_cpt("tokenize", *ARGUMENTS, "--output", output, "--workers", "2")
    assert done.returncode == TRANSIENT_FAULT
    named = re.search(
        r"error: no space left on the disk of (\S+) \((\S+) of its (\S+) GB are free\)", done.stderr
    )
    assert named is not None and "Traceback" not in done.stderr, done.stderr
    assert Path(named[1]).is_relative_to(disk.path) and float(named[3]) == pytest.approx(
        2**20 / 1e9, rel=0.01
    )
    needed = re.search(r"this corpus needs about (\S+) GB more", done.stderr)
    assert needed is not None
    left = held_bytes(disk.path)
    assert not (output / "manifest.json").exists()
    disk.grow(mib=100)
    assert scale_cpt("tokenize", *ARGUMENTS, "--output", output).returncode == 0
    assert not list(output.rglob("*.partial"))
    assert left / 1e9 + float(needed[1]) == pytest.approx(held_bytes(disk.path) / 1e9, rel=0.1)


def test_text_that_is_not_composed_is_counted_and_composed_where_asked(tmp_path: Path):
    decomposed = unicodedata.normalize("NFD", "한국어 문장")
    path = write_jsonl(tmp_path / "x.jsonl", [decomposed, "한국어", "ascii"])
    assert tokenize(tmp_path / "out", path).decomposed_documents == 1
    assert tokenize(tmp_path / "nfc", path, normalize="nfc").decomposed_documents == 0
    assert texts_in(tmp_path / "nfc") == ["한국어 문장", "한국어", "ascii"]


def test_after_a_wrong_text_key_the_right_one_begins_anew(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "a text"}\n' * 20)
    with pytest.raises(DataError, match=r"its keys: body.*set text_key"):
        tokenize(tmp_path / "out", path, max_bad_fraction=0.1)
    assert tokenize(tmp_path / "out", path, text_key="body").documents == 20
    with pytest.raises(DataError, match="begun with another text key"):
        tokenize(tmp_path / "out", path)


def test_a_record_that_is_most_of_the_text_stops_the_job_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """One of 202 records, but 99.5 % of the text."""
    path = tmp_path / "huge.jsonl"
    records = [*(["a b " * 200] * 200), "word " * 7_000_000, "end"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    stopped = (
        rf"35,000,012 of 35,160,\d+ bytes of text \(99.5%\) are in the 1 bad of 202 records, more "
        rf"than --max-bad-fraction 0.01 allows: {path} at 162600: too_large .*; split records of "
        "more than 32 MiB"
    )
    with pytest.raises(DataError, match=stopped) as error:
        tokenize(tmp_path / "out", path, max_bad_fraction=0.01)
    assert "\n" not in str(error.value)
    made = tokenize(tmp_path / "out", path, max_bad_fraction=1.0)
    assert (made.documents, made.rejected) == (201, {"too_large": 1})
    assert f"1 records rejected, 35000012 bytes of text; the largest: {path} at" in caplog.text
    (listed,) = read_jsonl(tmp_path / "out" / QUARANTINE)
    assert (listed["reason"], listed["size"]) == ("too_large", 35_000_012)


def test_a_few_short_bad_records_stop_no_job(tmp_path: Path):
    """Records without text lose nothing, whatever else is in them."""
    texts = [*documents(300), "", "   "]
    lines = [json.dumps({"text": text, "page": "<html>" * 2000}) + "\n" for text in texts]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    made = tokenize(tmp_path / "out", tmp_path / "x.jsonl", max_bad_fraction=0.01)
    assert (made.documents, made.rejected) == (300, {"empty_text": 2})
