"""Each node's copy of a base is hashed once, and compared with those of the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pipeline.files import file_systems
from pipeline.files.file_systems import is_on_shared_file_system
from pipeline.files.hashes import file_hash
from pipeline.model.from_hf import open_base
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.files import flip_bit
from tests.training.runs import in_turn, make_run, metrics, train

NODES = ("n1", "n2")
WEIGHTS = "model.safetensors"


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """A base on each of two nodes."""
    return [Path(shutil.copytree(STORIES, tmp_path / node / "base")) for node in NODES]


def as_node(folder: Path, name: str) -> None:
    """Gives this rank a node, whose own folder is below `folder`."""
    os.environ["SLURMD_NODENAME"] = name
    os.chdir(folder / name)


def train_on_own_node(config: Path, folder: Path) -> int:
    as_node(folder, NODES[dist.get_rank()])
    return train(config)


# Beside much other work one rank has once ended before it could answer.
@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("what", ["base", "expansion"])
def test_a_damaged_copy_on_one_node_is_refused(tokens, tmp_path, copies, monkeypatch, zero, what):
    monkeypatch.chdir(tmp_path / "n1")
    config = make_run(tmp_path / "run", tokens, zero=zero, base="base", schedule__steps=2)
    expansion = tmp_path / "run" / "initial_expansion"
    if what == "expansion":
        local = make_run(tmp_path / "other", tokens, zero=zero, base="base", schedule__steps=2)
        for node in NODES:
            shutil.copytree(expansion, tmp_path / node / "expansion")
        text = local.read_text() + "\ninit_expansion: expansion\n"
        config.write_text(text.replace(str(tmp_path / "other"), str(tmp_path / "run")))
    job = partial(train_on_own_node, config, tmp_path)
    damaged = copies[1] / WEIGHTS
    if what == "expansion":
        damaged = next((tmp_path / "n2" / "expansion").glob("*.safetensors"))
    flip_bit(damaged)
    first, second = run_ranks(in_turn, 2, [job])
    assert first == ["exit 1"], "it trained on a damaged copy"
    assert (
        second[0].startswith(("BaseModelError", "CheckpointError"))
        and f"{damaged.relative_to(tmp_path / 'n2')}: " in second[0]
    )
    assert "rank 1 on n2: " in second[0]
    if what == "base":
        assert "differs from the file of the same name on n1" in second[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

    flip_bit(damaged)
    assert run_ranks(in_turn, 2, [job]) == [[0], [0]]
    assert [line["step"] for line in metrics(tmp_path / "run")][-1] == 2


def hashed_files(folder: Path, nodes: Sequence[str], shared: bool) -> tuple[list[str], bool]:
    """Which files this rank hashes of a base that all ranks read, and whether it knows all
    hashes."""
    from pipeline.training import base_copies

    own: list[str] = []

    def counted(path: Path) -> str:
        own.append(path.name)
        return file_hash(path)

    os.environ["SLURMD_NODENAME"] = nodes[dist.get_rank()]
    base = open_base(folder)
    inputs = SimpleNamespace(base=base, method=SimpleNamespace(expansion=None))
    with (
        patch.object(base_copies, "file_hash", counted),
        patch.object(base_copies, "is_on_shared_file_system", lambda status: shared),
    ):
        base_copies.hash_base(inputs)
    return own, base.hashes == {file.name: file_hash(file) for file in base.files}


def test_the_ranks_that_read_one_copy_divide_its_files(tmp_path):
    base = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(STORIES)
    model.save_pretrained(base, max_shard_size="300KB")
    files = sorted(file.name for file in base.glob("*.safetensors"))
    assert len(files) >= 3
    nodes = ["n1", "n1", "n2"]
    jobs = [partial(hashed_files, base, nodes, shared) for shared in (False, True)]
    own_disks, one_disk = zip(*run_ranks(in_turn, 3, jobs), strict=True)
    assert all(is_complete for _, is_complete in (*own_disks, *one_disk))
    (first, _), (second, _), (other_node, _) = own_disks
    assert sorted(first + second) == other_node == files, "each node reads its copy once"
    (first, _), (second, _), (third, _) = one_disk
    assert sorted(first + second + third) == files, "all divide what they share"
    assert first and second and third


def test_a_file_that_a_node_lacks_is_named(tokens, tmp_path, copies, monkeypatch):
    monkeypatch.chdir(tmp_path / "n1")
    config = make_run(tmp_path / "run", tokens, zero=3, base="base")
    (copies[1] / WEIGHTS).unlink()
    _, second = run_ranks(in_turn, 2, [partial(train_on_own_node, config, tmp_path)])
    assert "rank 1 on n2: base/model.safetensors: no such file" in second[0]


@pytest.mark.parametrize(("kind", "is_shared"), [("nfs4", True), ("ext4", False)])
def test_what_nodes_share_is_told_by_the_type_of_the_file_system(
    tmp_path, monkeypatch, kind, is_shared
):
    status = tmp_path.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    mounts = tmp_path / "mountinfo"
    # As Linux writes it, with an optional field and without one.
    mounts.write_text(
        "24 1 0:99 / /proc rw - proc proc rw\n"
        f"36 24 {device} / /data rw,noatime master:1 - {kind} server:/data rw\n"
    )
    monkeypatch.setattr(file_systems, "_MOUNTS", mounts)
    file_systems._types_by_device.cache_clear()
    try:
        assert is_on_shared_file_system(status) == is_shared
    finally:
        file_systems._types_by_device.cache_clear()
