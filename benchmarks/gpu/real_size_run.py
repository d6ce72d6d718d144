"""A run of the trainer at a real size: its speed beside the bare step, its memory, and a trace."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import CheckRow, Setting, memory_row
from benchmarks.gpu.small_run import (
    KOREAN,
    NO_DEEPSPEED,
    has_deepspeed,
    prepare,
    train,
    write_config,
)
from benchmarks.gpu.timed_steps import steps_file
from benchmarks.gpu.trace import check_trace
from benchmarks.results import BASES, ROOT, STORIES
from pipeline.config.reading import read_yaml
from pipeline.config.run import RunConfig, load_config
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.model.from_hf import read_spec
from pipeline.parallel.topology import Layout
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import Estimator
from studies.harness.random_base import make_random_base
from studies.harness.study import RandomBase

_GIB = 2**30
_SHAPE = "1b-8192"
"""The shape of the benchmark of steps that has the sizes of this run."""


def check_run(setting: Setting) -> Iterator[CheckRow]:
    """A run with preflight, data loading, validation and an asynchronous checkpoint."""
    if not has_deepspeed():
        yield CheckRow("a run of 50 steps", None, NO_DEEPSPEED)
        return
    path = _write_run(setting)
    config = load_config(path)
    prepare(config)
    messages = train(path, setting)
    yield _preflight_row(messages)

    lines = read_metrics(config.folder / METRICS)
    rate = _median_rate(lines)
    steps = config.schedule.steps
    yield CheckRow(f"{steps} steps under ZeRO-1: tokens/s of the median step", None, f"{rate:,.0f}")
    if setting.on_gpu and steps_file(setting, _SHAPE).exists():
        yield _beside_bare_step(rate, steps_file(setting, _SHAPE))
    yield from check_trace(config.folder, setting)

    measured: float | None = None
    if setting.on_gpu:
        measured = max(line.get("memory_peak_allocated_gib", 0.0) for line in lines)
    yield memory_row("peak memory of the run", _estimated_gib(config), measured)


def _write_run(setting: Setting) -> Path:
    """The configuration: Adapt on a 1B for 50 steps; on a CPU a few steps on the small base."""
    if setting.on_gpu:
        steps = 50
        length = 8192
        # Late, when kernels are chosen and no validation or checkpoint is near.
        traced = [40, 44]
        text = KOREAN.format("")
        changes = _real_base(setting)
    else:
        steps = 4
        length = 64
        traced = [3, 3]
        text = KOREAN.format("heldout.")
        changes = {}
    corpus = {"input": [text], "heldout_input": [KOREAN.format("heldout.")]}
    return write_config(
        setting,
        "run",
        **changes,
        data={
            # A folder for each device: the tokens of a CPU's run are those of another text.
            "folder": str(setting.folder / f"tokens-{setting.device_type}"),
            "sequence_length": length,
            "corpora": {"ko": corpus},
        },
        schedule={
            "steps": steps,
            "global_batch_size": 2,
            "micro_batch_size": 2,
            "learning_rate": 1e-4,
        },
        validation={"every_steps": steps // 2, "max_sequences": 4},
        checkpoints={"every_steps": steps // 2, "asynchronous": True},
        profile={"steps": traced},
        preflight={"enabled": True},
    )


def _real_base(setting: Setting) -> dict[str, Any]:
    """The sections of a run on a 1B, whose base is made here with random weights."""
    base = setting.folder / "base"
    make_random_base(RandomBase(architecture=BASES / "llama-3.2-1b.json", tokenizer=STORIES), base)
    shipped = read_yaml(ROOT / "configs" / "cpt_korean_llama3.2_1b.yaml")
    method = dict(shipped["method"])
    # Random values are quicker than decompositions of the base's matrices, and cost a step as much.
    method["initialisers"] = {"base_to_expansion": "random"}
    return {"base": str(base), "method": method}


def _preflight_row(messages: str) -> CheckRow:
    for line in messages.splitlines():
        if "preflight: passed" in line:
            return CheckRow("preflight", True, line)
    return CheckRow("preflight", False, "no such line")


def _median_rate(lines: Sequence[dict[str, Any]]) -> float:
    """Tokens a second of the median step."""
    rates: list[float] = []
    for line in lines:
        if "tokens_per_second_per_gpu" in line:
            rates.append(line["tokens_per_second_per_gpu"])
    # Without the first fifth, in which kernels are chosen and the allocator's memory grows.
    return statistics.median(rates[len(rates) // 5 :])


def _beside_bare_step(rate: float, file: Path) -> CheckRow:
    """What the trainer costs beside the step: its rate over Adapt's in the benchmark of steps."""
    found = "not known"
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        # A row of a variant that was not measured has no rate.
        if row["variant"] == "adapt" and "tokens_per_second" in row:
            found = f"{rate / row['tokens_per_second']:.2f}"
    return CheckRow("the same over the bare step of the benchmark", None, found)


def _estimated_gib(config: RunConfig) -> float:
    """The peak of memory that `scale-cpt estimate` gives for the run on one GPU."""
    settings = load_deepspeed_config(config.deepspeed, Layout(1, 1))
    estimator = Estimator(config, read_spec(config.base), settings, Cluster(gpus=1))
    memory, _ = estimator.memory(estimator.own_choice)
    return memory.total / _GIB
