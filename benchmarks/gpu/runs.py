"""Real runs of the project's programs: under each ZeRO stage and resumed, at a real size, and the demo."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.ranks import check_new_group, check_two_ranks
from benchmarks.gpu.setting import BASES, ROOT, STORIES, Row, Setting, small_methods
from benchmarks.gpu.trace import check_trace
from pipeline.config.method import ScaleMethod
from pipeline.config.reading import read_yaml
from pipeline.config.run import RunConfig, load_config
from pipeline.data.corpora import corpus_jobs
from pipeline.data.preprocess import preprocess
from pipeline.data.workers import local_workers
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.files import write_text
from pipeline.methods.scale import upscale
from pipeline.model.from_hf import open_base, read_spec
from pipeline.parallel.topology import Layout
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import Estimator
from pipeline.studies.random_base import make_random_base
from pipeline.studies.study import RandomBase

_GIB = 2**30
_MEMORY_TOLERANCE = 0.1
_OF_A_LAUNCHER = ("SLURM_", "OMPI_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "EXPECTED_WORLD_SIZE")
"""Variables that begin like this would make these runs ranks of an allocation."""
KOREAN, ENGLISH = "data/ko/reviews.{}jsonl.zst", "data/en/stories.{}jsonl.zst"
NO_DEEPSPEED = "skipped: deepspeed is not installed"


def run(command: list[str], setting: Setting, *, timeout: float | None = None, **variables: str) -> str:
    """Runs a command of the project, and returns its messages.

    Raises:
        RuntimeError: it failed; with its error.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_LAUNCHER)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": setting.device_type, **variables}
    done = subprocess.run(command, cwd=ROOT, env={**inherited, **own}, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:4])} ended with {done.returncode}: {_last_line(done.stderr + done.stdout)}"
        )
    return done.stderr


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "no output")[:400]


def write_config(setting: Setting, name: str, **changes: Any) -> Path:  # noqa: ANN401  # sections of YAML
    """Writes the configuration of a small run; `changes` replace whole sections. An earlier such run is removed."""
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
        "data": {"folder": str(setting.folder / "tokens"), "sequence_length": 64, "corpora": corpora},
        "schedule": {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "learning_rate": 2e-3},
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
    upscale(config.method, open_base(config.base), config.upscaled_folder, config.seed)


def train(path: Path, setting: Setting) -> str:
    """Trains in one process, or resumes; returns its messages."""
    return run([sys.executable, "-m", "pipeline.train", str(path)], setting)


def losses(config: RunConfig) -> list[float]:
    """Those of all steps so far."""
    return [step["loss"] for step in read_metrics(config.folder / METRICS) if "loss" in step]


def has_deepspeed() -> bool:
    """Whether training can run here."""
    return importlib.util.find_spec("deepspeed") is not None


def check_deepspeed(setting: Setting) -> Iterator[Row]:
    """A new group's first call; two ranks that share the device through gloo; a run under each ZeRO stage, resumed."""
    yield check_new_group(setting)
    yield check_two_ranks(setting)
    if not has_deepspeed():
        yield Row("training under ZeRO-1, 2 and 3", None, NO_DEEPSPEED)
        return
    for stage in (1, 2, 3) if setting.on_gpu else (3,):  # a rehearsal tries one
        config = write_config(setting, f"zero{stage}", deepspeed=f"ds_configs/zero{stage}.json")
        own = load_config(config)
        prepare(own)
        train(config, setting)
        before = losses(own)
        summary = json.loads((own.folder / "training.json").read_text(encoding="utf-8"))
        difference = summary["step0_max_abs_logit_difference"]
        yield Row(f"ZeRO-{stage}: logits at step 0 less the base's", difference == 0, str(difference))
        shutil.rmtree(own.folder / "checkpoints" / "step_00000004")
        (own.folder / "training.json").unlink()
        train(config, setting)
        again = losses(own)
        # On a GPU the order of sums in a backward pass is not fixed: only the first step after the restart is exact.
        same = again[:3] == before[:3] and (setting.on_gpu or again == before)
        close = len(again) == len(before) == 4 and abs(again[3] / before[3] - 1) < 0.01
        found = f"{again[2:]}, before: {before[2:]}"
        yield Row(f"ZeRO-{stage}: losses after resuming in the middle", same and close, found)


def check_run(setting: Setting) -> Iterator[Row]:
    """A run with preflight, data loading, validation and an asynchronous checkpoint: speed, memory, and a trace."""
    if not has_deepspeed():
        yield Row("a run of 50 steps", None, NO_DEEPSPEED)
        return
    changes: dict[str, Any] = {}
    steps, length, traced, texts = 4, 64, [3, 3], [KOREAN.format("heldout.")]
    if setting.on_gpu:
        steps, length, traced, texts = 50, 8192, [40, 44], [KOREAN.format("")]
        base = setting.folder / "base"
        make_random_base(RandomBase(architecture=BASES / "llama-3.2-1b.json", tokenizer=STORIES), base)
        changes["base"] = str(base)
        changes["method"] = read_yaml(ROOT / "configs" / "cpt_korean_llama3.2_1b.yaml")["method"] | {
            "initialisers": {"base_to_expansion": "random"}  # quicker than its decompositions
        }
    config_path = write_config(
        setting,
        "run",
        **changes,
        data={
            "folder": str(setting.folder / f"tokens-{setting.device_type}"),  # a rehearsal's are others
            "sequence_length": length,
            "corpora": {"ko": {"input": texts, "heldout_input": [KOREAN.format("heldout.")]}},
        },
        schedule={"steps": steps, "global_batch_size": 2, "micro_batch_size": 2, "learning_rate": 1e-4},
        validation={"every_steps": steps // 2, "max_sequences": 4},
        checkpoints={"every_steps": steps // 2, "asynchronous": True},
        profile={"steps": traced},
        preflight={"enabled": True},
    )
    config = load_config(config_path)
    prepare(config)
    messages = train(config_path, setting).splitlines()
    passed = next((line for line in messages if "preflight: passed" in line), "no such line")
    yield Row("preflight", "preflight: passed" in passed, passed)
    lines = read_metrics(config.folder / METRICS)
    rates = [line["tokens_per_second_per_gpu"] for line in lines if "tokens_per_second_per_gpu" in line]
    rate = statistics.median(rates[len(rates) // 5 :])
    yield Row(f"{steps} steps under ZeRO-1: tokens/s of the median step", None, f"{rate:,.0f}")
    bare = bare_rate(setting.folder / "gpu_step-1b-8192.json", "adapt")
    if bare is not None and setting.on_gpu:
        yield Row("the same over the bare step of the benchmark", None, f"{rate / bare:.2f}")
    yield from check_trace(config.folder, setting)
    estimator = Estimator(
        config, read_spec(config.base), load_deepspeed_config(config.deepspeed, Layout(1, 1)), Cluster(gpus=1)
    )
    estimated = estimator.memory(estimator.own_choice)[0].total / _GIB
    measured = max((line.get("memory_peak_allocated_gib", 0.0) for line in lines), default=0.0)
    yield compared("peak memory of the run", estimated, measured if setting.on_gpu else None)


def bare_rate(path: Path, variant: str) -> float | None:
    """The tokens/s that the benchmark of steps measured, if it ran."""
    if not path.exists():
        return None
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return next((row.get("tokens_per_second") for row in rows if row["variant"] == variant), None)


def compared(what: str, estimated_gib: float, measured_gib: float | None) -> Row:
    """Whether an estimate of memory holds within a tenth."""
    if measured_gib is None:
        return Row(what, None, f"estimated {estimated_gib:.3g} GiB; measured on a GPU only")
    off = estimated_gib / measured_gib - 1
    found = f"estimated {estimated_gib:.2f} GiB, measured {measured_gib:.2f} GiB: off by {off:+.1%}"
    return Row(what, abs(off) <= _MEMORY_TOLERANCE, found)


def check_demo(setting: Setting) -> Iterator[Row]:
    """All stages of the demo, from text to an evaluated export; a rehearsal trains a few steps."""
    if not has_deepspeed():
        yield Row("the demo", None, NO_DEEPSPEED)
        return
    values = read_yaml(ROOT / "configs" / "demo.yaml")
    folder = setting.folder / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    values |= {"folder": str(folder), "data": {**values["data"], "folder": str(folder / "tokens")}}
    if not setting.on_gpu:
        values["schedule"] |= {"steps": 2}
        values["validation"] |= {"max_sequences": 2}
        values["data"]["corpora"]["own_text"]["sample"] = {"tokens": 4000}
        values["gate"] = {"tokens": 1000, "max_open_fraction": 0.1}
        for kind, name in (("korean", KOREAN), ("english", ENGLISH)):
            values["data"]["corpora"][kind]["input"] = [name.format("heldout.")]
    config = setting.folder / "demo.yaml"
    write_text(config, yaml.safe_dump(values))
    run(["bash", "slurm/cpt_korean.sh", str(config)], setting, NPROC="1", CONFIG=str(config))
    trained = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    difference = trained["step0_max_abs_logit_difference"]
    yield Row("the demo: logits at step 0 less the base's", difference == 0, str(difference))
    scores = {name: f"{figures['perplexity']:.3g}" for name, figures in trained["validation"].items()}
    exports = sorted(path.parent.name for path in folder.rglob("config.json") if path.parent != folder)
    yield Row("the demo: trained, converted and evaluated", bool(exports), f"perplexities {scores}, exports {exports}")
