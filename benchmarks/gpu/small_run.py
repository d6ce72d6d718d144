"""Small runs of the trainer in one process: their configuration, their inputs, and what they prove
at step 0."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.commands import run_command
from benchmarks.gpu.setting import CheckRow, Setting, small_methods
from benchmarks.results import STORIES
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data.tokenize.corpora import corpus_jobs
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import local_workers
from pipeline.files.publishing import write_text
from pipeline.methods.scale import upscale
from pipeline.model.from_hf import open_base

KOREAN = "examples/data/ko/reviews.{}jsonl.zst"
ENGLISH = "examples/data/en/stories.{}jsonl.zst"
"""The shipped texts; with `heldout.` in the name the held-out ones, which are smaller."""
NO_DEEPSPEED = "skipped: deepspeed is not installed"


def has_deepspeed() -> bool:
    """Whether training can run here."""
    return importlib.util.find_spec("deepspeed") is not None


def write_config(setting: Setting, name: str, **changes: Any) -> Path:  # sections of YAML
    """Writes the configuration of a small run; `changes` replace whole sections.

    An earlier run of this name is removed.
    """
    shutil.rmtree(setting.folder / name, ignore_errors=True)
    # Both corpora are small ones, and are held out too: losses are compared, and not learned from.
    korean = [KOREAN.format("heldout.")]
    english = [ENGLISH.format("heldout.")]
    corpora = {
        "ko": {"input": korean, "heldout_input": korean},
        "en": {"input": english, "heldout_input": english, "role": "replay"},
    }
    values = {
        "name": name,
        "folder": str(setting.folder / name),
        "base": str(STORIES),
        "method": small_methods()["adapt"].model_dump(mode="json", exclude_none=True),
        "data": {
            # Runs share the folder: a corpus that is there already is not tokenized again.
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
    return run_command([sys.executable, "-m", "pipeline", "train", str(path)], setting)


def preservation_row(name: str, run_folder: Path) -> CheckRow:
    """Whether a run began with the base's logits, by its training.json."""
    training = json.loads((run_folder / "training.json").read_text(encoding="utf-8"))
    difference = training["step0_max_abs_logit_difference"]
    check = f"{name}: logits at step 0 less the base's"
    return CheckRow(check, difference == 0, str(difference))
