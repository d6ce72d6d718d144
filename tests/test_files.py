"""Folders are complete or absent, and names from untrusted files cannot leave their folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file

from pipeline import installation
from pipeline.errors import TRANSIENT_FAULT, DataError, exit_code_of, in_one_line
from pipeline.files import publishing
from pipeline.files.folders import FolderKind, published_folder
from pipeline.files.json_files import read_object, read_record, write_json, write_record
from pipeline.files.publishing import publish_first, write_text
from pipeline.files.reading import is_plain_name, read_inside, read_text
from pipeline.files.threads import in_threads
from pipeline.installation import locate_docs
from tests.disks import NO_HARD_LINKS, NO_SAFE_RENAME, refuse_calls
from tests.files import change_json
from tests.kills import outlives

FILES = ("a", "b")
THINGS = FolderKind("a thing", "thing.json", "things 1")


def publish(path: Path, text: str) -> None:
    with published_folder(path, THINGS) as folder:
        for name in FILES:
            (folder / name).write_text(text)
        write_json(folder / THINGS.record, {"format": THINGS.format})


def texts_of(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in FILES if (folder / name).exists()]


def test_a_kill_at_any_instant_leaves_the_old_folder_or_the_new(tmp_path: Path):
    for changes in count():
        path = tmp_path / str(changes) / "folder"
        publish(path, "old")
        ended = outlives(changes, publish, path, "new")
        if path.exists():
            assert texts_of(path) in (["old", "old"], ["new", "new"])
        else:
            assert ["old", "old"] in [texts_of(aside) for aside in path.parent.iterdir()]
        if ended:
            assert texts_of(path) == ["new", "new"]
            assert list(path.parent.iterdir()) == [path]
            break
        publish(path, "newer")
        assert texts_of(path) == ["newer", "newer"]
        assert list(path.parent.iterdir()) == [path], "a killed one left something"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../up", "a/b", "a/..", "a\\b", "a\0b", "[" * 256]
)
def test_a_name_with_a_path_is_refused(name: str):
    assert not is_plain_name(name)
    assert all(
        map(
            is_plain_name,
            ("model-00001-of-00002.safetensors", "..hidden", "a..b", "모델.bin", "with space"),
        )
    )


def test_in_threads_keeps_the_order_and_stops_at_an_error():
    begun = []

    def square(number: int) -> int:
        begun.append(number)
        time.sleep(0.01)
        return number**2 if number < 50 else fail()

    def fail() -> int:
        raise ValueError("fifty")

    assert list(in_threads(square, range(50))) == [number**2 for number in range(50)]
    with pytest.raises(ValueError, match="fifty"):
        list(in_threads(square, range(50, 1000)))
    assert len(begun) < 1000


class _Pair(BaseModel):
    model_config = ConfigDict(extra="forbid")

    left: int
    right: list[int] = []


@pytest.mark.parametrize("reader", [read_text, read_object])
def test_what_cannot_be_read_is_one_line_of_the_callers_type(
    tmp_path: Path, reader: Callable[..., object]
):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        reader(path, DataError, "take another")
    path.write_bytes(b"\xff\xfe")
    for place, fault in (
        (path, "not UTF-8|not JSON"),
        (tmp_path, "Is a directory"),
        (path / "below", "Not a directory"),
    ):
        with pytest.raises(DataError, match=rf"{place}: .*({fault}).*; take another$") as caught:
            reader(place, DataError, "take another")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "expected a JSON object, found list"),
        (b'{"left": 1, "right": [2, "x"]}', r"right\.1: Input should be a valid integer"),
        (b'{"left": 1, "middle": 2}', "middle: Extra inputs are not permitted"),
    ],
)
def test_a_record_of_another_content_is_refused(tmp_path: Path, content: bytes, message: str):
    path, record = tmp_path / "file", _Pair(left=1, right=[2])
    write_record(path, record)
    assert read_record(path, _Pair, DataError) == record
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: .*{message}"):
        read_record(path, _Pair, DataError)


def test_a_record_that_was_changed_is_noticed_by_its_checksum(tmp_path: Path):
    path, record = tmp_path / "file", _Pair(left=1, right=[2])
    write_record(path, record)
    assert read_record(path, _Pair, DataError, needs_checksum=True) == record
    change_json(path, left=2)
    with pytest.raises(
        DataError,
        match=f"{path}: does not match its checksum: it was changed or damaged .*; again$",
    ):
        read_record(path, _Pair, DataError, "again")
    path.write_bytes(b'{"left": 1, "right": [2]}')
    assert read_record(path, _Pair, DataError) == record, "earlier versions wrote none"
    with pytest.raises(DataError, match=f"{path}: has no checksum: .*; again$"):
        read_record(path, _Pair, DataError, "again", needs_checksum=True)


def test_a_link_out_of_a_strangers_folder_is_refused(tmp_path: Path):
    (folder := tmp_path / "model").mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "README.md").symlink_to("../secret")
    with pytest.raises(DataError, match="outside its folder"):
        read_inside(folder, "README.md", DataError)
    (snapshot := tmp_path / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "7").write_text("text")
    (snapshot / "README.md").symlink_to("../../blobs/7")
    assert read_inside(snapshot, "README.md", DataError) == b"text"


def test_files_of_a_published_folder_are_as_readable_as_it_is(tmp_path):
    with published_folder(tmp_path / "out", None) as partial:
        (partial / "weights").touch(mode=0o600)
    folder, file = (
        path.stat().st_mode & 0o666 for path in (tmp_path / "out", tmp_path / "out" / "weights")
    )
    assert file == folder


@pytest.mark.parametrize("kind", ["a file", "safetensors in a folder", "an open file in a folder"])
def test_the_error_of_a_full_disk_names_what_was_written(small_disk, kind):
    path = small_disk(mib=1).path / "output"
    with pytest.raises(OSError, match="No space left") as raised:
        if kind == "a file":
            write_text(path, "x" * 2**21)
        else:
            with published_folder(path, None) as folder:
                if kind.startswith("safetensors"):
                    save_file({"a": torch.zeros(2**20)}, folder / "a.safetensors")
                else:
                    (folder / "a").write_bytes(bytes(2**21))
    assert exit_code_of(raised.value) == TRANSIENT_FAULT
    said = in_one_line(raised.value)
    assert f"no space left on the disk of {path} (" in said and "of its 0.00105 GB are free" in said
    assert not path.exists()


def test_pages_are_named_as_a_user_finds_them(tmp_path, monkeypatch):
    text = "expected a number; docs/configuration.md lists every setting (docs/gate.md#cost)"
    assert locate_docs(text) == text, "in the project's folder"
    monkeypatch.chdir(tmp_path)
    root = Path(installation.__file__).parents[1]
    settings = "expected a number; scale-cpt describe-config lists every setting"
    assert locate_docs(text) == f"{settings} ({root}/docs/gate.md#cost)"
    installed = tmp_path / "site-packages" / "pipeline" / "installation.py"
    monkeypatch.setattr(installation, "__file__", str(installed))
    assert locate_docs(text) == f"{settings} (docs/gate.md#cost in the source of scale-cpt)"


def _be_first(own: Path, path: Path, refusals: dict[str, int]) -> None:
    refuse_calls(refusals)
    first = publish_first(own, path)
    assert not own.exists()
    os._exit(0 if first else 3)


@pytest.mark.parametrize(
    "refusals", [{}, NO_HARD_LINKS, NO_SAFE_RENAME], ids=["links", "no links", "rename only"]
)
def test_of_processes_that_publish_a_file_at_once_one_is_first_and_none_replaces_it(
    tmp_path: Path, refusals
):
    path = tmp_path / "plan.json"
    children = {}
    for number in range(12):
        own = tmp_path / f".{number}"
        own.write_text(str(number))
        if (child := os.fork()) == 0:
            try:
                _be_first(own, path, refusals)
            finally:
                os._exit(1)
        children[child] = number
    codes = {
        number: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for child, number in children.items()
    }
    assert sorted(codes.values()) == [0] + 11 * [3]
    assert codes[int(path.read_text())] == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_claim_of_a_killed_process_does_not_hold_others_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pipeline.files.publishing._CLAIM_S", 0.1)
    (tmp_path / ".plan.json.claim.partial").mkdir()
    (own := tmp_path / "own").write_text("x")
    publishing._rename_under_claim(own, tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


IN_CONTAINER = """
import os, sys
from pathlib import Path
from pipeline.files import folders, publishing
path = Path(sys.argv[1])
print(os.getpid(), publishing.own_temporary(path).name, flush=True)
with folders.published_folder(path, None) as partial:
    (partial / "file").touch()
    print("begun", flush=True)
    sys.stdin.readline()
"""


def test_processes_of_two_containers_with_one_number_do_not_share_temporary_names(tmp_path: Path):
    """Nor does one take the other's unfinished folder for that of a killed process."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", IN_CONTAINER]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with ExitStack() as containers:
        said = []
        for name in ("one", "one", "two"):
            process = containers.enter_context(
                subprocess.Popen([*command, str(tmp_path / name)], **pipes)
            )
            containers.callback(process.kill)
            said.append([process.stdout.readline() for _ in range(2)])
            if not said[-1][0]:
                pytest.skip(f"namespaces need root: {process.stderr.read()}")
        assert [begun for _, begun in said] == ["begun\n"] * 3
        (first, own), (second, other) = (line.split() for line, _ in said[:2])
        assert first == second and own != other
        assert len(list(tmp_path.glob(".one.*.partial"))) == 2
        with published_folder(tmp_path / "one", None):
            pass
        assert len(list(tmp_path.glob(".one.*.partial"))) == 2, (
            "this process knows nothing of theirs"
        )
