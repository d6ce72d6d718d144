"""Real runs of the project's programs: each ZeRO stage, resumed; a real size; the demo; the
benchmark of steps."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.ranks import check_two_ranks
from benchmarks.gpu.setting import CheckRow, Setting, small_methods
from benchmarks.gpu_step.shapes import ON_A_GPU
from benchmarks.results import BASES, ROOT, STORIES
from pipeline.config.method import ScaleMethod
from pipeline.config.reading import read_yaml
from pipeline.config.run import RunConfig, load_config
from pipeline.data.tokenize.corpora import corpus_jobs
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import local_workers
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.files.publishing import write_text
from pipeline.methods.scale import upscale
from pipeline.model.from_hf import open_base, read_spec
from pipeline.parallel.topology import Layout
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import Estimator
from studies.harness.random_base import make_random_base
from studies.harness.study import RandomBase

_GIB = 2**30
_MEMORY_TOLERANCE, _MOST_IDLE = 0.1, 0.05
_LAST_TURN_S, _TO_REPORT_S = 40.0, 5.0
_OF_A_LAUNCHER = (
    "SLURM_",
    "OMPI_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_",
    "EXPECTED_WORLD_SIZE",
)
"""Variables that begin like this would make these runs ranks of an allocation."""
KOREAN, ENGLISH = "examples/data/ko/reviews.{}jsonl.zst", "examples/data/en/stories.{}jsonl.zst"
NO_DEEPSPEED = "skipped: deepspeed is not installed"


def run(
    command: list[str], setting: Setting, *, timeout: float | None = None, **variables: str
) -> str:
    """Runs a command of the project, and returns its messages.

    Raises:
        RuntimeError: it failed; with its error.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_A_LAUNCHER)
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": setting.device_type,
        **variables,
    }
    done = subprocess.run(
        command, cwd=ROOT, env={**inherited, **own}, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        output = done.stderr + done.stdout
        print(output, file=sys.stderr)  # into the log of this part
        lines = [line for line in output.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("error:")]
        raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        error = (told[:1] or raised[-1:] or lines[-1:] or ["no output"])[0]
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}: {error[:400]}")
    return done.stderr


def write_config(setting: Setting, name: str, **changes: Any) -> Path:  # sections of YAML
    """Writes the configuration of a small run; `changes` replace whole sections. An earlier such
    run is removed."""
    shutil.rmtree(setting.folder / name, ignore_errors=True)
    heldout = {"ko": [KOREAN.format("heldout.")], "en": [ENGLISH.format("heldout.")]}
    corpora: dict[str, dict[str, Any]] = {
        corpus: {"input": files, "heldout_input": files} for corpus, files in heldout.items()
    }
    corpora["en"]["role"] = "replay"
    values = {
        "name": name,
        "folder": str(setting.folder / name),
        "base": str(STORIES),
        "method": small_methods()["adapt"].model_dump(mode="json", exclude_none=True),
        "data": {
            "folder": str(setting.folder / "tokens"),
            "sequence_length": 64,
            "corpora": corpora,
        },
        "schedule": {
            "steps": 4,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "learning_rate": 2e-3,
        },
        "validation": {"every_steps": 4, "max_sequences": 4},
        "checkpoints": {"every_steps": 2},
        "preflight": {"enabled": False},
        "deepspeed": "ds_configs/zero1.json",
        **changes,
    }
    path = setting.folder / f"{name}.yaml"
    write_text(path, yaml.safe_dump(values))
    return path


def prepare(config: RunConfig) -> None:
    """Tokenizes the run's texts, unless another run did, and makes its expansion."""
    with local_workers(1) as workers:
        for job in corpus_jobs(config.data, config.base):
            preprocess(job, workers)
    assert isinstance(config.method, ScaleMethod)
    upscale(config.method, open_base(config.base), config.initial_expansion_folder, config.seed)


def train(path: Path, setting: Setting) -> str:
    """Trains in one process, or resumes; returns its messages."""
    return run([sys.executable, "-m", "pipeline", "train", str(path)], setting)


def has_deepspeed() -> bool:
    """Whether training can run here."""
    return importlib.util.find_spec("deepspeed") is not None


def check_deepspeed(setting: Setting) -> Iterator[CheckRow]:
    """A new group's first call; two ranks that share the device through gloo; a run under each ZeRO
    stage, resumed."""
    yield check_two_ranks(setting)
    if not has_deepspeed():
        yield CheckRow("training under ZeRO-1, 2 and 3", None, NO_DEEPSPEED)
        return
    for stage in (1, 2, 3) if setting.on_gpu else (3,):  # on a CPU one is tried
        config = write_config(setting, f"zero{stage}", deepspeed=f"ds_configs/zero{stage}.json")
        own = load_config(config)
        prepare(own)
        train(config, setting)
        before = [step["loss"] for step in read_metrics(own.folder / METRICS) if "loss" in step]
        yield _step0(f"ZeRO-{stage}", own.folder)[0]
        shutil.rmtree(own.folder / "checkpoints" / "step_00000004")
        (own.folder / "training.json").unlink()
        train(config, setting)
        again = [step["loss"] for step in read_metrics(own.folder / METRICS) if "loss" in step]
        # On a GPU the order of sums in a backward pass is not fixed: only the first step after the
        # restart is exact.
        same = again[:3] == before[:3] and (setting.on_gpu or again == before)
        close = len(again) == len(before) == 4 and abs(again[3] / before[3] - 1) < 0.01
        found = f"{again[2:]}, before: {before[2:]}"
        yield CheckRow(f"ZeRO-{stage}: losses after resuming in the middle", same and close, found)


def _step0(name: str, folder: Path) -> tuple[CheckRow, dict[str, Any]]:
    """Whether a run began with the base's logits; and its training.json."""
    trained: dict[str, Any] = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    difference = trained["step0_max_abs_logit_difference"]
    return CheckRow(
        f"{name}: logits at step 0 less the base's", difference == 0, str(difference)
    ), trained


def check_run(setting: Setting) -> Iterator[CheckRow]:
    """A run with preflight, data loading, validation and an asynchronous checkpoint: speed, memory,
    and a trace."""
    if not has_deepspeed():
        yield CheckRow("a run of 50 steps", None, NO_DEEPSPEED)
        return
    changes: dict[str, Any] = {}
    steps, length, traced, texts = 4, 64, [3, 3], [KOREAN.format("heldout.")]
    if setting.on_gpu:
        steps, length, traced, texts = 50, 8192, [40, 44], [KOREAN.format("")]
        base = setting.folder / "base"
        make_random_base(
            RandomBase(architecture=BASES / "llama-3.2-1b.json", tokenizer=STORIES), base
        )
        changes["base"] = str(base)
        changes["method"] = read_yaml(ROOT / "configs" / "cpt_korean_llama3.2_1b.yaml")[
            "method"
        ] | {
            "initialisers": {"base_to_expansion": "random"}  # quicker than its decompositions
        }
    config_path = write_config(
        setting,
        "run",
        **changes,
        data={
            "folder": str(setting.folder / f"tokens-{setting.device_type}"),  # a CPU's are others
            "sequence_length": length,
            "corpora": {"ko": {"input": texts, "heldout_input": [KOREAN.format("heldout.")]}},
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
    config = load_config(config_path)
    prepare(config)
    messages = train(config_path, setting).splitlines()
    passed = next((line for line in messages if "preflight: passed" in line), "no such line")
    yield CheckRow("preflight", "preflight: passed" in passed, passed)
    lines = read_metrics(config.folder / METRICS)
    rates = [
        line["tokens_per_second_per_gpu"] for line in lines if "tokens_per_second_per_gpu" in line
    ]
    rate = statistics.median(rates[len(rates) // 5 :])
    yield CheckRow(f"{steps} steps under ZeRO-1: tokens/s of the median step", None, f"{rate:,.0f}")
    if setting.on_gpu and (steps_file := _steps_file(setting, "1b-8192")).exists():
        rows = json.loads(steps_file.read_text(encoding="utf-8"))["rows"]
        bare = next(
            (row.get("tokens_per_second") for row in rows if row["variant"] == "adapt"), None
        )
        yield CheckRow(
            "the same over the bare step of the benchmark",
            None,
            f"{rate / bare:.2f}" if bare else "not known",
        )
    yield from check_trace(config.folder, setting)
    estimator = Estimator(
        config,
        read_spec(config.base),
        load_deepspeed_config(config.deepspeed, Layout(1, 1)),
        Cluster(gpus=1),
    )
    estimated = estimator.memory(estimator.own_choice)[0].total / _GIB
    measured = max((line.get("memory_peak_allocated_gib", 0.0) for line in lines), default=0.0)
    yield compared("peak memory of the run", estimated, measured if setting.on_gpu else None)


def check_trace(run_folder: Path, setting: Setting) -> Iterator[CheckRow]:
    """The device's idle share over the traced steps of a run, and its optimizer."""
    from pipeline.observers.performance import PROFILE  # it needs deepspeed, as the run did

    (path,) = (run_folder / PROFILE).iterdir()
    events = []
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        # "X": an event with a duration. On a GPU a span of the program appears a second time, as
        # what the device did in it (gpu_user_annotation).
        if event["ph"] == "X" and event.get("cat") != "gpu_user_annotation":
            events.append(event)

    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if setting.on_gpu else ("cpu_op",)
    steps: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    fused = 0
    for event in events:
        interval = event["ts"], event["ts"] + event["dur"]
        if re.fullmatch(r"ProfilerStep#\d+", event["name"]):
            steps.append(interval)
        if event.get("cat") in kinds:
            busy.append(interval)
        if event["name"] == "aten::_fused_adamw_":
            fused += 1

    window = min(begin for begin, _ in steps), max(end for _, end in steps)
    idle = idle_share(busy, window)
    found = f"{idle:.1%} of {(window[1] - window[0]) / 1e3:,.1f} ms"
    if not setting.on_gpu:
        found += ", between operators of the CPU: says nothing about a GPU"
    passed = idle < _MOST_IDLE if setting.judges_speed else None
    yield CheckRow(
        f"time between kernels in {len(steps)} step(s) of the run (goal: below 5 %)", passed, found
    )
    yield CheckRow(
        "the optimizer of the run is torch's fused AdamW",
        fused > 0,
        f"{fused} calls in {len(steps)} step(s)",
    )


def idle_share(busy: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """The share of `window` that no interval of `busy` covers; they may overlap, and reach beyond
    it."""
    covered, reached = 0.0, window[0]
    for begin, end in sorted(busy):
        end = min(end, window[1])
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - covered / (window[1] - window[0])


def compared(what: str, estimated_gib: float, measured_gib: float | None) -> CheckRow:
    """Whether an estimate of memory holds within a tenth."""
    if measured_gib is None:
        return CheckRow(what, None, f"estimated {estimated_gib:.3g} GiB; measured on a GPU only")
    off = estimated_gib / measured_gib - 1
    found = f"estimated {estimated_gib:.2f} GiB, measured {measured_gib:.2f} GiB: off by {off:+.1%}"
    return CheckRow(what, abs(off) <= _MEMORY_TOLERANCE, found)


def check_demo(setting: Setting) -> Iterator[CheckRow]:
    """All stages of the demo, from text to an evaluated export; on a CPU it trains a few steps."""
    if not has_deepspeed():
        yield CheckRow("the demo", None, NO_DEEPSPEED)
        return
    values = read_yaml(ROOT / "configs" / "demo.yaml")
    folder = setting.folder / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    values |= {"folder": str(folder), "data": {**values["data"], "folder": str(folder / "tokens")}}
    if not setting.on_gpu:
        values["schedule"] |= {"steps": 2}
        values["validation"] |= {"max_sequences": 2}
        values["data"]["corpora"]["self_generated"]["sample"] = {"tokens": 4000}
        values["gate"] = {"tokens": 1000, "max_open_fraction": 0.1}
        for kind, name in (("korean", KOREAN), ("english", ENGLISH)):
            values["data"]["corpora"][kind]["input"] = [name.format("heldout.")]
    config = setting.folder / "demo.yaml"
    write_text(config, yaml.safe_dump(values))
    run(["bash", "slurm/cpt_korean.sh", str(config)], setting, NPROC="1", CONFIG=str(config))
    row, trained = _step0("the demo", folder)
    yield row
    scores = {
        name: f"{figures['perplexity']:.3g}" for name, figures in trained["validation"].items()
    }
    exports = sorted(
        path.parent.name for path in folder.rglob("config.json") if path.parent != folder
    )
    yield CheckRow(
        "the demo: trained, converted and evaluated",
        bool(exports),
        f"perplexities {scores}, exports {exports}",
    )


def _steps_file(setting: Setting, shape: str) -> Path:
    return setting.folder / f"gpu_step-{shape}.json"


def check_steps(setting: Setting, shape: str) -> Iterator[CheckRow]:
    """The speed and memory of every variant of the benchmark of training steps."""
    output = _steps_file(setting, shape)
    options = [
        "--shape",
        shape,
        "--seconds",
        str(max(1.0, setting.seconds - _LAST_TURN_S)),
        "--json",
        str(output),
    ]
    if not setting.on_gpu:
        options += ["--cpu", "--tiny", "--rounds", "1", "--steps", "1", "--threads", "1"]
        if shape != ON_A_GPU[0]:  # every variant is tried once
            options += ["--variant", "fft", "preserve"]
    output.unlink(missing_ok=True)
    try:
        run(
            [sys.executable, "-m", "benchmarks.gpu_step", *options],
            setting,
            timeout=setting.seconds - _TO_REPORT_S,
        )
    except subprocess.TimeoutExpired:
        yield CheckRow(
            f"{shape}: the last turn ends in time",
            False,
            "ended; the rows below are what it had found",
        )
    for row in json.loads(output.read_text(encoding="utf-8"))["rows"] if output.exists() else ():
        found = row["outcome"]
        if found == "measured":
            found = f"{row['tokens_per_second']:,.0f} tokens/s, {row['tflops']:.1f} TFLOP/s, "
            found += f"{row['seconds_per_step']:.4f} s a step"
            found += f", {row['peak_memory_gib']:.1f} GiB" if "peak_memory_gib" in row else ""
        yield CheckRow(f"{shape}, {row['variant']}", None, found)
