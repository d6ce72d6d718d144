"""Checkpoints of DeepSpeed runs are read back without DeepSpeed, bit-identical at any layout."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.checkpoint.rank_files import CheckpointReader, RankState, write_rank_file
from pipeline.checkpoint.trained_model import open_trained
from pipeline.errors import BaseModelError, CheckpointError
from pipeline.parallel.parameters import partition_of
from pipeline.parallel.sharding import Partition, merge
from tests.bases import STORIES
from tests.conversion.checkpoints import (
    FFT,
    Account,
    checkpoint_in,
    save,
    save_many,
    scale,
    trained,
    zero,
)
from tests.distributed import run_ranks
from tests.files import cut

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ZeRO-2, dp 2": (2, 1, zero(2)),
    "ZeRO-3, dp 3, several flat tensors": (3, 1, zero(3, sub_group_size=600)),
    "ZeRO-3, tp 2 x dp 2": (4, 2, zero(3)),
    "ZeRO-1, tp 4, shared key/value heads": (4, 4, zero(1)),
    "ZeRO-1, dp 2, bf16": (2, 1, zero(1, "bf16")),
    "ZeRO-3, dp 2, bf16": (2, 1, zero(3, "bf16")),
}
METHODS = {"route": scale("route"), "fft": FFT}
FILE_OVERHEAD = 2**16
"""Names, shapes and the archive's own table, in bytes."""


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """The folder of each layout and method, and what each rank held."""
    folder = tmp_path_factory.mktemp("layouts")
    accounts = {}
    for world_size in {world_size for world_size, _, _ in LAYOUTS.values()}:
        jobs = {
            (layout, name): (
                base("llama").path,
                method,
                folder / f"{index}-{name}",
                tp_size,
                values,
            )
            for index, (layout, (size, tp_size, values)) in enumerate(LAYOUTS.items())
            for name, method in METHODS.items()
            if size == world_size
        }
        ranks = run_ranks(save_with_accounts, world_size, [*jobs.values()])
        accounts.update(
            {
                key: (job[2], held)
                for key, job, *held in zip(jobs, jobs.values(), *ranks, strict=True)
            }
        )
    return accounts


def save_with_accounts(jobs: list[tuple[Any, ...]]) -> list[Account | None]:
    """As `save_many`; returns what this rank held of each."""
    return [save(*job, account=True) for job in jobs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_and_moment_is_read_back(layout, base, saved):
    world_size, tp_size, _ = LAYOUTS[layout]
    for name in METHODS:
        folder, ranks = saved[layout, name]
        model = trained(base("llama").path, folder)
        assert model.reader.tp_size == tp_size
        assert len(list(model.checkpoint.glob("rank_*"))) == world_size
        partitions = {
            name: partition_of(parameter) for name, parameter in model.structure.named_parameters()
        }
        check(model.reader, ranks[:tp_size], partitions)


def check(reader: CheckpointReader, shards: list[Account], split: dict[str, Partition]) -> None:
    """Compares with what each tensor-parallel rank held."""
    assert set(reader.names) == set(shards[0]["fp32"])
    for name in reader.names:
        size = reader.read(name).shape[split[name].dim or 0]
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            expected = merge([shard[kind][name] for shard in shards], split[name], size)
            found = reader.read(name, kind)
            assert found.dtype == torch.float32
            assert torch.equal(found, expected), (name, kind)
    assert any(reader.read(name, "exp_avg_sq").any() for name in reader.names)


@pytest.fixture(scope="module")
def small(base, tmp_path_factory):
    """The folder of a checkpoint of two ranks, of a base whose embedding is tied, by ZeRO stage."""
    folder = tmp_path_factory.mktemp("small")
    run_ranks(
        save_many,
        2,
        [
            (STORIES, scale("adapt"), folder / str(stage), 1, zero(stage, "bf16"))
            for stage in (1, 3)
        ],
    )
    return lambda stage: folder / str(stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_holds_what_trained_once(stage, small):
    """12 bytes a trained parameter, and of the base nothing."""
    model = trained(STORIES, small(stage))
    owed = 12 * sum(math.prod(model.shapes[name]) for name in model.trained)
    files = list(model.checkpoint.glob("rank_*"))
    assert len(files) == 2
    assert (
        owed < sum(file.stat().st_size for file in files) < 1.01 * owed + len(files) * FILE_OVERHEAD
    )


@pytest.fixture
def copied(small, tmp_path):
    return shutil.copytree(checkpoint_in(small(3)), tmp_path / "copy")


class Bomb:
    """Creates the file `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut short": cut,
    "a pickle": lambda file: torch.save(Bomb(file.parent / "mark"), file),
    "without layout": lambda file: save_file({"weights": torch.zeros(1)}, file),
    "another place": lambda file: shutil.copy(file.with_name("rank_00000.safetensors"), file),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_nothing_in_it_runs(damage, copied):
    DAMAGE[damage](copied / "rank_00001.safetensors")
    with pytest.raises(CheckpointError, match=str(copied)) as error:
        reader = open_trained(copied, STORIES).reader
        [reader.read(name, "exp_avg") for name in reader.names]
    assert "\n" not in str(error.value)
    assert not (copied / "mark").exists()


def test_a_copy_without_the_files_of_a_node_is_refused(saved, base, tmp_path):
    folder, _ = saved["ZeRO-1, tp 4, shared key/value heads", "fft"]
    copy = shutil.copytree(checkpoint_in(folder), tmp_path / "copy")
    (copy / "rank_00003.safetensors").unlink()
    reader = open_trained(copy, base("llama").path).reader
    with pytest.raises(
        CheckpointError,
        match=r"the files of tensor-parallel rank 3 do not make up .* from every node",
    ):
        [reader.read(name) for name in reader.names]


def test_a_full_disk_is_an_oserror(small_disk):
    state = RankState(0, 1, {"w": 0}, {"w/fp32": torch.zeros(1_000_000)}, torch.tensor(1.0), {})
    with pytest.raises(OSError, match="No space left"):
        write_rank_file(small_disk(mib=1).path / "rank_00000.safetensors", state)


def test_another_base_is_refused(copied, base):
    with pytest.raises(BaseModelError, match="other weights"):
        open_trained(copied, base("llama biases").path)


def test_a_checkpoint_of_another_method_is_refused(copied):
    values = json.loads((copied / "manifest.json").read_text())
    del values["checksum"]  # as an earlier version wrote it, which does not notice the change
    assert values["run"]["method"]["collaborative_modules"] == "attention"
    values["run"]["method"]["collaborative_modules"] = "both"
    (copied / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(
        CheckpointError, match=r"lacks layers\.1\.ffn\.down\.expansion_to_base\.weight"
    ):
        open_trained(copied, STORIES)
