"""Short runs of the real model, and the commands that follow them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import FINISHED
from tests.distributed import run_ranks
from tests.texts import REVIEWS_HELDOUT
from tests.training.runs import make_run, train

TIMEOUT_S = 1800.0
LORA = {"name": "lora", "rank": 9, "open_rows": {"min_count": 20}, "open_gains": True}
BOOKS = REVIEWS_HELDOUT.parents[1] / "en" / "gutenberg.heldout.jsonl.zst"
ENGLISH = torch.tensor([[504, 2470, 282, 4649, 314]])
KOREAN = torch.tensor([[33085, 246, 181, 130, 251, 183, 240, 129] * 4])


def scale_cpt(*arguments: object) -> None:
    """Runs a command in a process of its own, and shows what it printed where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def settings_of(base: Path, method: dict[str, object], **changes: object) -> dict[str, Any]:
    korean, english = [str(REVIEWS_HELDOUT)], [str(BOOKS)]
    return {
        "base": str(base),
        "method": method,
        "data__sequence_length": 64,
        "data__corpora": {
            "korean": {"input": korean, "heldout_input": korean},
            "english": {"input": english, "heldout_input": english, "role": "replay"},
        },
        "data__replay_fraction": 0.0,
        "schedule": {
            "steps": 4,
            "global_batch_size": 6,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
        },
        "validation": {"every_steps": 100, "max_sequences": 2},
        "checkpoints": {"every_steps": 2},
        "gate": {"tokens": 1000},
        "zero": 1,
        **changes,
    }


def trained(folder: Path, tokens: Path, settings: dict[str, object]) -> Path:
    """A run that one process has finished; its YAML file."""
    run = make_run(folder, tokens, **settings)
    assert run_ranks(train, 1, run, timeout_s=TIMEOUT_S) == [FINISHED]
    return run
