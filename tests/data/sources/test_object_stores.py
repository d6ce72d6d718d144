"""Corpora that are read over the network become the tokens that files on this machine become."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.sources import object_stores
from pipeline.data.sources.object_stores import RemoteFile, matching_urls
from pipeline.data.tokenize.input_files import input_files, is_here, named_files
from pipeline.data.tokenize.unit_records import STATE
from pipeline.errors import DataError, MissingPackageError
from tests.data.helpers import (
    PROJECT,
    STORIES260K,
    TOOL,
    contents,
    documents,
    tokenize,
    write_jsonl,
)
from tests.data.range_server import serving
from tests.waiting import wait_until

TEXTS = documents(200)
NAMES = ("a.jsonl", "b.jsonl.zst", "c.parquet", "d.jsonl.gz", "e.arrow")


@pytest.fixture(scope="module")
def files(module_folder: Path) -> Path:
    """A file of each family of formats."""
    folder = module_folder / "files"
    folder.mkdir()
    for name in NAMES:
        if "jsonl" in name:
            write_jsonl(folder / name, TEXTS)
    table = pa.table({"text": TEXTS})
    pq.write_table(table, folder / "c.parquet", row_group_size=20)
    with (
        pa.OSFile(str(folder / "e.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as to,
    ):
        to.write_table(table, max_chunksize=20)
    return folder


@pytest.fixture
def memory(files: Path) -> Iterator[str]:
    """The URL of a folder in memory with these files."""
    system = fsspec.filesystem("memory")
    for file in files.iterdir():
        system.pipe(f"/bucket/{file.name}", file.read_bytes())
    yield "memory:///bucket"
    system.rm("/bucket", recursive=True)


def tokens_in(folder: Path) -> dict[str, str]:
    """The hashes of a corpus's shards."""
    return {
        name.partition("/")[2]: digest
        for name, digest in contents(folder).items()
        if not name.endswith(".json")
    }


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_local_file(files: Path, memory: str, tmp_path: Path, name: str):
    tokenize(tmp_path / "local", files / name, unit_bytes=2000)
    manifest = tokenize(tmp_path / "remote", f"{memory}/{name}", unit_bytes=2000)
    assert tokens_in(tmp_path / "remote") == tokens_in(tmp_path / "local")
    assert len(tokens_in(tmp_path / "remote")) > 2
    (file,) = manifest.inputs
    assert (file.path, file.bytes) == (f"{memory}/{name}", (files / name).stat().st_size)
    assert file.sha256.startswith("sampled:")


def test_patterns_of_urls_are_sorted_and_their_size_is_said_first(
    memory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    names = [str(file) for file in input_files([f"{memory}/*.jsonl*"])]
    assert names == [f"{memory}/{name}" for name in ("a.jsonl", "b.jsonl.zst", "d.jsonl.gz")]
    assert not is_here([f"{memory}/a.jsonl"])
    with caplog.at_level(logging.INFO, logger="pipeline"):
        tokenize(tmp_path / "out", f"{memory}/*.jsonl*")
    assert "reads 3 files, " in caplog.text and " KiB" in caplog.text


def test_a_file_named_by_a_url_is_a_local_one(files: Path):
    assert named_files([(files / "a.jsonl").as_uri()]) == [files / "a.jsonl"]


def test_what_identifies_a_file_changes_with_it(memory: str):
    before = RemoteFile(f"{memory}/a.jsonl").identity()
    content = bytearray(fsspec.filesystem("memory").cat("/bucket/a.jsonl"))
    content[0] ^= 1
    fsspec.filesystem("memory").pipe("/bucket/a.jsonl", bytes(content))
    assert RemoteFile(f"{memory}/a.jsonl").identity() != before


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("memory://bucket/none.jsonl", "memory://bucket/none.jsonl: no such file"),
        ("memory://bucket/none*.jsonl", "no file matches it"),
        ("nowhere://bucket/a.jsonl", "nowhere://: no such protocol"),
        ("https://me:hidden@host/a.jsonl", "https://host/a.jsonl: its URL holds a credential"),
        ("https://host/a.jsonl?X-Amz-Signature=hidden", "host/a.jsonl: its URL holds a credential"),
        ("memory://bucket/a.bin", "tokens of Megatron-LM are read from this machine"),
    ],
)
def test_what_cannot_be_read_is_one_line_without_credentials(memory: str, name: str, fault: str):
    with pytest.raises(DataError, match=fault) as raised:
        input_files([name])
    assert "\n" not in str(raised.value)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(("protocol", "extra"), [("s3", "s3"), ("gs", "gs"), ("abfs", "az")])
def test_a_missing_package_is_named_by_its_extra(
    protocol: str, extra: str, monkeypatch: pytest.MonkeyPatch
):
    def missing(_: str) -> None:
        raise ImportError("Install it to access it")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    object_stores._system.cache_clear()
    with pytest.raises(MissingPackageError, match=rf"pip install 'scale-cpt\[{extra}\]'") as raised:
        matching_urls(f"{protocol}://bucket/a.jsonl")
    assert "\n" not in str(raised.value)


def test_a_server_without_ranges_is_refused(files: Path):
    with serving(files) as server:
        server.has_ranges = False
        with pytest.raises(DataError, match="does not answer requests for a part"):
            input_files([f"{server.url}/a.jsonl"])


def test_a_killed_job_that_reads_from_a_server_continues_to_the_same_bytes(tmp_path: Path):
    (tmp_path / "files").mkdir()
    source = write_jsonl(tmp_path / "files" / "x.jsonl", documents(12_000))
    tokenize(tmp_path / "local" / "corpus", source, unit_bytes=20_000)
    output = tmp_path / "remote" / "corpus"
    with serving(source.parent) as server:
        url = f"{server.url}/x.jsonl"
        arguments = ["--input", url, "--tokenizer", str(STORIES260K), "--output", str(output)]
        command = [*TOOL, *arguments, "--workers", "1", "--unit-mib", str(20_000 / 2**20)]
        server.seconds = 0.1
        job = subprocess.Popen(command, cwd=PROJECT, env=dict(os.environ))
        state = output / STATE
        assert wait_until(lambda: len([*state.glob("00000-*.json")]) > 2, every_s=0.01)
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert not (output / "manifest.json").exists()
        done = {file: file.stat().st_ino for file in output.glob("*.bin")}
        server.seconds = 0.0
        subprocess.run(command, cwd=PROJECT, check=True)
    assert done == {file: file.stat().st_ino for file in done}, "finished units are kept"
    assert tokens_in(output) == tokens_in(tmp_path / "local" / "corpus")
    ours, local = (load_manifest(folder) for folder in (output, tmp_path / "local" / "corpus"))
    assert ours.model_dump(exclude={"inputs"}) == local.model_dump(exclude={"inputs"})
    assert json.loads((output / "manifest.json").read_text())["inputs"][0][0] == url
