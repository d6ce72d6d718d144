"""A small study, stories260K on a little of the demo's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.bases import STORIES
from tests.training.runs import write_config

STEPS = 3
BEYOND = 9e5
"""A learning rate whose first step makes every number infinite, after `let_diverge`."""


def study_values(folder: Path, tokens: Path) -> dict[str, Any]:
    """SCALE-Adapt at one learning rate, LoRA at two, with two seeds."""
    run = yaml.safe_load(write_config(folder / "template", tokens, zero=1).read_text())
    settings = {
        key: run[key] for key in ("data", "validation", "checkpoints", "preflight", "deepspeed")
    }
    settings["schedule"] = {**run["schedule"], "steps": STEPS}
    settings["validation"] = {"every_steps": 1, "max_sequences": 2}
    del settings["schedule"]["learning_rate"]
    return {
        "name": "small",
        "folder": str(folder / "study"),
        "base": str(STORIES),
        "settings": settings,
        "methods": {
            "adapt": {"label": "SCALE-Adapt", "method": run["method"], "learning_rates": [2e-3]},
            "lora": {
                "label": "LoRA",
                "method": {"name": "lora", "rank": 15},
                "learning_rates": [2e-3, 1e-5],
            },
        },
        "seeds": [1, 2],
    }


def let_diverge(values: dict[str, Any]) -> None:
    """Lets every run at the learning rate BEYOND diverge."""
    values["settings"]["stability"] = {"max_skipped_steps": 0}
    values["settings"]["schedule"]["weight_decay"] = 10.0


def write_study(folder: Path, values: dict[str, Any]) -> Path:
    """Writes the study's YAML file."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path
