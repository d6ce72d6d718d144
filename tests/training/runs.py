"""Small real runs: stories260K on a little of the demo's text, under real DeepSpeed."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

from pipeline.config.method import starts_from_expansion
from pipeline.config.run import RunConfig, load_config
from pipeline.data.tokenize.corpora import corpus_jobs
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import local_workers
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import UserError
from pipeline.methods.own_tokens import own_tokens_of
from pipeline.methods.scale import upscale
from pipeline.model.bases import open_base
from pipeline.parallel.parameters import partition_of
from pipeline.parallel.ranks import summed
from tests.bases import STORIES
from tests.files import read_jsonl
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT

STEPS = 6
MEASURED = ("tokens_per_second_per_gpu", "mfu", "seconds/", "memory_")
"""Prefixes of figures that are measured. Only in these do identical runs differ."""


def make_tokens(folder: Path) -> Path:
    """Tokenizes the held-out reviews and stories, as both parts of two corpora, into `folder`."""
    tokenize_corpora(load_config(write_config(folder / "run", folder)))
    return folder


def tokenize_corpora(config: RunConfig) -> None:
    """Tokenizes the corpora of a run."""
    with local_workers(1) as workers:
        for job in corpus_jobs(config.data, config.tokenizer):
            preprocess(job, workers)


def write_config(
    run: Path, tokens: Path, *, zero: int = 3, name: str = "run.yaml", **changes: Any
) -> Path:
    """Writes the configuration of a run in the folder `run`; `changes` have dotted paths, with __
    for the dot.
    """
    run.mkdir(parents=True, exist_ok=True)
    zero_file = run / f"zero{zero}.json"
    sharding = {"stage3_param_persistence_threshold": 0} if zero == 3 else {}
    zero_file.write_text(
        json.dumps({"zero_optimization": {"stage": zero, "overlap_comm": False, **sharding}})
    )
    korean, english = [str(REVIEWS_HELDOUT)], [str(STORIES_HELDOUT)]
    values: dict[str, Any] = {
        "name": "test",
        "folder": str(run),
        "base": str(STORIES),
        "method": {
            "name": "scale",
            "variant": "adapt",
            "expansion": {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4},
            "l_fp": 3,
        },
        "data": {
            "folder": str(tokens),
            "sequence_length": 32,
            "corpora": {
                "korean": {"input": korean, "heldout_input": korean},
                "english": {"input": english, "heldout_input": english, "role": "replay"},
            },
            "replay_fraction": 0.25,
        },
        "schedule": {
            "steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 2e-3,
        },
        "validation": {"every_steps": 100, "max_sequences": 5},
        "checkpoints": {"every_steps": 100},
        "preflight": {"enabled": False},  # it takes longer than these runs
        "deepspeed": str(zero_file),
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    path = run / name
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def make_run(run: Path, tokens: Path, **changes: Any) -> Path:
    """A run that is ready to train: its configuration, and its initial expansion."""
    path = write_config(run, tokens, **changes)
    config = load_config(path)
    if starts_from_expansion(config.method):
        base = open_base(config.base, config.base_code)
        own_tokens = own_tokens_of(
            config,
            base.spec.vocab_size,
            tokenizer_fingerprint=load_tokenizer(config.tokenizer).fingerprint,
        )
        upscale(config.method, base, config.initial_expansion_folder, config.seed, own_tokens)
    return path


def metrics(run: Path) -> list[dict[str, float]]:
    """The run's figures, without those that are measured: no two runs share them."""
    lines = []
    for line in read_jsonl(run / "metrics.jsonl"):
        reproducible = {}
        for key, value in line.items():
            if not key.startswith(MEASURED):
                reproducible[key] = value
        lines.append(reproducible)
    return lines


def losses(run: Path) -> list[float]:
    """The training loss of every step, each step once."""
    steps = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


def in_turn(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs several jobs on the same ranks, because starting ranks and DeepSpeed takes longer than a
    small run.

    Returns:
        The results: "<type>: <message>" for a job that ended in a UserError, and "exit <code>" for
        one that ended because of another rank's error.
    """
    results: list[Any] = []
    for job in jobs:
        try:
            results.append(job())
        except UserError as error:
            results.append(f"{type(error).__name__}: {error}")
        except SystemExit as end:
            results.append(f"exit {end.code}")
    return results


def train(
    config: Path, *, stop: bool = False, kill_at: str | None = None, changes: Sequence[str] = ()
) -> int:
    """Trains on all ranks, with `changes` of settings; returns the exit code.

    stop: the last rank gets SIGUSR1 during its first step.
    kill_at: rank 0 is killed (SIGKILL) when its second save reaches that point.
    """
    start_deepspeed()
    from pipeline.observers import make_observers
    from pipeline.training import trainer
    from pipeline.training.attempt import run_training

    if kill_at is not None and os.environ["RANK"] == "0":
        _kill_in_second_save(kill_at)
    original = trainer.learning_rate

    def signalled(*arguments: Any) -> float:
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(*arguments)

    last_rank = str(int(os.environ["WORLD_SIZE"]) - 1)
    learning_rate = original
    if stop and os.environ["RANK"] == last_rank:
        # Called once a step: the signal comes in the middle of the first.
        learning_rate = signalled
    with patch.object(trainer, "learning_rate", learning_rate):
        return run_training(config, torch.device("cpu"), make_observers, changes)


def train_compiled(config: Path, *, stop: bool = False) -> int:
    """Trains layers that are compiled for the kernels of eager mode, which needs no compiler of
    C++.
    """
    from pipeline.model.decoder import Decoder

    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    original = Decoder.compile_layers

    def compile_layers(model: Decoder) -> None:
        original(model, backend="aot_eager")

    with patch.object(Decoder, "compile_layers", compile_layers):
        return train(config, stop=stop)


def train_and_look(config: Path) -> dict[str, Any]:
    """Trains; returns this rank's shards of the parameters at the end, and how much DeepSpeed's
    optimizer holds.
    """
    import deepspeed

    trainer = trained(prepared(config))
    engine = trainer.engine
    parameters = {}
    partitions = {}
    # ZeRO-3 has an empty tensor in place of a parameter that is not gathered.
    with deepspeed.zero.GatheredParameters(list(engine.model.parameters())):
        for name, parameter in engine.model.named_parameters():
            parameters[name] = parameter.detach().clone()
            partitions[name] = partition_of(parameter)
    held = 0
    for state in engine._engine.optimizer.optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                held += value.numel()
    return {
        "parameters": parameters,
        "partitions": partitions,
        "moments": int(summed(torch.tensor(held))),
        "trainable_parameters": engine.trainable_parameters,
        "step0_max_abs_logit_difference": trainer.step0_difference,
    }


def trained(trainer: Any) -> Any:
    """The same trainer at the end of its run."""
    from pipeline.training.launch import StopSignals

    trainer.train(StopSignals())
    return ended(trainer)


def ended(trainer: Any) -> Any:
    """The same trainer without its observers' threads and files."""
    for observer in trainer.observers:
        observer.on_end(finished=trainer.finished)
    return trainer


def prepared(config: Path) -> Any:
    """The trainer of a run, which is about to start or to resume."""
    start_deepspeed()
    from pipeline.checks.checklist import check_stage
    from pipeline.health.phases import Phases
    from pipeline.observers import make_observers
    from pipeline.training.trainer import Trainer

    cpu = torch.device("cpu")
    inputs = check_stage(load_config(config), int(os.environ["WORLD_SIZE"]), "train")
    return Trainer(inputs, cpu, Phases(cpu), make_observers)


def start_deepspeed() -> None:
    """Makes DeepSpeed use the rank's process group."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


KILL_POINTS = {
    "before the files are hashed": ("training.checkpointing", "file_hash"),
    "before the folder is renamed": ("checkpoint.manifest", "write_record"),
    "before the old one is removed": ("checkpoint.folder", "discard"),
}


def _kill_in_second_save(point: str) -> None:
    """Replaces a function that every save calls by a SIGKILL of this process."""
    from pipeline.training.checkpointing import CheckpointManager

    module_name, function = KILL_POINTS[point]
    module = importlib.import_module(f"pipeline.{module_name}")
    assert callable(getattr(module, function))
    original = CheckpointManager.save
    saves = itertools.count(1)

    def save(*arguments: Any, **options: Any) -> Path:
        if next(saves) == 2:
            # An asynchronous first save may still be on its way to that function.
            arguments[0].finish()
            setattr(module, function, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return original(*arguments, **options)

    CheckpointManager.save = save
