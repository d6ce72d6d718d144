"""Faults of an allocation are found before the first step and reported in one line by rank 0."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pipeline.checks.checklist import check_allocation
from pipeline.checks.inputs import RunInputs
from pipeline.checks.preflight import checkpoint_disk
from pipeline.config.run import load_config
from pipeline.errors import TRANSIENT_FAULT, USER_ERROR, UserError
from pipeline.parallel.topology import ProcessGroups
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.files import flip_bit
from tests.training.runs import write_config


def on_rank(
    config_path: Path, prepare: Callable[..., None] = lambda: None, *arguments: Any
) -> str | list[str]:
    """Checks the allocation on simulated nodes of two ranks.

    Returns the logged lines, or how the rank ended.
    """
    rank, lines = dist.get_rank(), []
    os.environ["SLURMD_NODENAME"] = f"n{rank // 2 + 1}"
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pipeline.checks.checklist").addHandler(handler)
    logging.getLogger("pipeline.checks.checklist").setLevel(logging.INFO)
    prepare(*arguments)
    config = load_config(config_path)
    inputs = RunInputs(config, dist.get_world_size())
    if not config.data.folder.exists():
        inputs.samples = SimpleNamespace(corpora=[])
    try:
        check_allocation(inputs, ProcessGroups(inputs.layout), torch.device("cpu"))
    except UserError as error:
        return f"error: {error}"
    except SystemExit as end:
        return f"silent exit {end.code}"
    return lines


def configured(run: Path, **changes: Any) -> Path:
    # No limit on speed: a shared machine may be slow. The batch divides over 1 to 4 ranks.
    unhurried = {
        "preflight__enabled": True,
        "preflight__min_gb_per_s": 0,
        "schedule__global_batch_size": 12,
    }
    return write_config(run, run / "tokens", **{"zero": 2, **unhurried, **changes})


def refusal(config: Path, world_size: int, *arguments: Any, exit_code: int = USER_ERROR) -> str:
    """The error line of rank 0; all other ranks must exit without a message."""
    first, *others = run_ranks(on_rank, world_size, config, *arguments)
    assert others == [f"silent exit {exit_code}"] * (world_size - 1)
    assert first.startswith("error: preflight: ")
    assert "\n" not in first
    return first


def test_damaged_tokens_are_found(tmp_path, tokens: Path):
    shutil.copytree(tokens, tmp_path / "tokens")
    damaged = sorted((tmp_path / "tokens" / "english").glob("*.bin"))[-1]
    flip_bit(damaged, -5)
    line = refusal(configured(tmp_path), 2)
    assert (
        f"preflight: 1 fault(s): {damaged}: damaged: expected {damaged.stat().st_size} bytes, "
        "found other ones" in line
    )
    assert line.endswith("text that the base writes) (seen on n1)")


def test_a_sound_allocation_is_described(tmp_path):
    config = configured(tmp_path, parallel__tp_size=2)
    lines, *_ = run_ranks(on_rank, 4, config)
    text = "\n".join(lines)
    assert "4 rank(s): 2 on n1, 2 on n2" in text
    assert re.search(r"tensor-parallel all-reduce over 2 ranks within a node: [\d.]+ GB/s", text)
    assert re.search(r"data-parallel all-reduce over 2 ranks across nodes: [\d.]+ GB/s", text)
    assert "matrix products right on every rank" in text
    assert "are the same on 2 node(s)" in text
    assert re.search(r"needs [\d.]+ of [\d.]+ GiB of host memory", text)
    assert re.search(r"[\d.e+]+ GB free, checkpoints need [\d.e+-]+ GB more", text)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert run_ranks(on_rank, 1, configured(tmp_path, preflight__enabled=False)) == [[]]


def test_all_faults_are_reported_together(tmp_path):
    config = configured(tmp_path, preflight__min_gb_per_s=1e6)
    (tmp_path / "zero2.json").write_text(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e15}}'
    )
    message = refusal(config, 2)
    assert message.startswith("error: preflight: 2 fault(s): ")
    assert "all-reduce over the data-parallel group of ranks 0, 1 (n1): " in message
    assert "expected at least 1e+06 (preflight.min_gb_per_s)" in message
    assert "GiB of host memory, found" in message


def flip_a_bit() -> None:
    """On the last rank every matrix product has a flipped bit in an element."""
    multiply = torch.mm

    def corrupted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        product.view(torch.int32)[7, 7] ^= 1
        return product

    if dist.get_rank() == dist.get_world_size() - 1:
        torch.mm = corrupted  # of this process, which is forked for the test


def test_a_rank_with_a_wrong_product_is_named_with_its_node(tmp_path):
    message = refusal(configured(tmp_path), 3, flip_a_bit, exit_code=TRANSIENT_FAULT)
    assert "rank 2 on n2: a matrix product has 1 wrong elements of 262144" in message
    assert message.endswith("--exclude=n2")


def own_folder(folder: Path) -> None:
    """Gives each node a separate working directory, and so a separate base."""
    checkpoint_disk.PATIENCE_S = 1.0
    os.chdir(folder / os.environ["SLURMD_NODENAME"])


@pytest.fixture
def bases(tmp_path):
    """A base on each of two nodes."""
    return [Path(shutil.copytree(STORIES, tmp_path / node / "base")) for node in ("n1", "n2")]


def test_another_base_on_one_node_and_a_folder_that_they_do_not_share(tmp_path, bases):
    file = bases[1] / "model.safetensors"
    weights = load_file(file)
    save_file(
        {name: tensor * 1.001 for name, tensor in weights.items()}, file, metadata={"format": "pt"}
    )
    message = refusal(configured(tmp_path, base="base", folder="run"), 3, own_folder, tmp_path)
    assert "base/model.safetensors: differs between n2 and n1" in message
    assert "tokenizer.json" not in message
    assert "run/checkpoints: n1 does not see what n2 wrote there" in message
    assert "run/checkpoints: n2 does not see what n1 wrote there" in message


def test_a_node_that_lacks_the_tokenizer(tmp_path, bases):
    (bases[1] / "tokenizer.json").unlink()
    ends = run_ranks(on_rank, 3, configured(tmp_path, base="base"), own_folder, tmp_path)
    assert ends[:2] == [f"silent exit {USER_ERROR}"] * 2
    assert "base/tokenizer.json: no such tokenizer" in ends[2]


def test_a_disk_without_room(small_disk, tmp_path):
    disk = small_disk(mib=1)
    config = configured(tmp_path, folder=str(disk.path / "run"))
    message = refusal(config, 1)
    assert re.search(r"the checkpoints need 0\.00\d+ GB more, found 0\.00\d+ GB free", message)
    disk.fill()
    assert re.search(
        r"checkpoints: (n1 cannot write there: No space|the checkpoints need)", refusal(config, 1)
    )
