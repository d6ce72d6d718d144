"""Training under each ZeRO stage, resumed in the middle, and tensor parallelism over two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.ranks import check_two_ranks
from benchmarks.gpu.setting import CheckRow, Setting
from benchmarks.gpu.small_run import (
    NO_DEEPSPEED,
    has_deepspeed,
    prepare,
    preservation_row,
    train,
    write_config,
)
from pipeline.config.run import load_config
from pipeline.run_folder.metrics import METRICS, read_metrics


def check_deepspeed(setting: Setting) -> Iterator[CheckRow]:
    """Two tensor-parallel ranks that share the device through gloo; then a run under each ZeRO
    stage."""
    yield check_two_ranks(setting)
    if not has_deepspeed():
        yield CheckRow("training under ZeRO-1, 2 and 3", None, NO_DEEPSPEED)
        return
    # On a CPU one stage is tried: the one that cuts parameters too.
    stages = (1, 2, 3) if setting.on_gpu else (3,)
    for stage in stages:
        yield from _check_stage(stage, setting)


def _check_stage(stage: int, setting: Setting) -> Iterator[CheckRow]:
    """Trains four steps, removes what followed the checkpoint at step 2, and trains again."""
    path = write_config(setting, f"zero{stage}", deepspeed=f"ds_configs/zero{stage}.json")
    config = load_config(path)
    prepare(config)
    train(path, setting)
    before = _losses(config.folder)
    yield preservation_row(f"ZeRO-{stage}", config.folder)

    shutil.rmtree(config.folder / "checkpoints" / "step_00000004")
    # It says that the run is finished, and a finished run is not resumed.
    (config.folder / "training.json").unlink()
    train(path, setting)
    again = _losses(config.folder)
    # On a GPU the order of sums in a backward pass is not fixed: only the first step after the
    # restart, whose weights are those of the checkpoint, is exact.
    exact = again[:3] == before[:3] if setting.on_gpu else again == before
    close = len(again) == len(before) == 4 and abs(again[3] / before[3] - 1) < 0.01
    yield CheckRow(
        f"ZeRO-{stage}: losses after resuming in the middle",
        exact and close,
        f"{again[2:]}, before: {before[2:]}",
    )


def _losses(run_folder: Path) -> list[float]:
    """The training loss of each step that the metrics have."""
    losses: list[float] = []
    for line in read_metrics(run_folder / METRICS):
        # Lines of validation have no training loss.
        if "loss" in line:
            losses.append(line["loss"])
    return losses
