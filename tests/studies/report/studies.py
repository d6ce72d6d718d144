"""Invented summaries of studies, with perplexities that fall and rise about as in the paper."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.files.json_files import write_json

# Label, method, trained parameters; as in the paper the fall of the new perplexity and the rise of
# the kept one, in nats.
METHODS = (
    ("Full fine-tuning", "fft", 1_236_000_000, 0.955, 0.181),
    ("LoRA", "lora", 180_000_000, 0.955, 0.181),
    ("Freeze", "freeze", 790_000_000, 0.903, 0.191),
    ("LLaMA Pro", "llama_pro", 243_000_000, 0.951, 0.076),
    ("SCALE-Preserve", "preserve", 252_000_000, 0.752, 0.015),
    ("SCALE-Adapt", "adapt", 252_000_000, 0.949, 0.032),
    ("SCALE-Route", "route", 252_000_000, 0.949, 0.022),
)
STEPS = 1000
BEFORE = {"korean": 16.9, "english": 10.42}


def figures(learned: float, forgotten: float) -> dict[str, dict[str, float]]:
    """Of both corpora, that far from the base in nats."""
    perplexities = {
        "korean": BEFORE["korean"] * math.exp(-learned),
        "english": BEFORE["english"] * math.exp(forgotten),
    }
    return {
        name: {"perplexity": value, "bits_per_byte": math.log2(value) / 2.7}
        for name, value in perplexities.items()
    }


def row(
    label: str, method: str, trained: int, learned: float, forgotten: float, seed: int
) -> dict[str, Any]:
    """A row in the shape of a study's summary.json."""
    noise = random.Random(f"{label}/{seed}")
    learned *= noise.gauss(1, 0.012)
    forgotten *= noise.gauss(1, 0.09)
    shares = [(number / 8, 1 - math.exp(-5 * number / 8)) for number in range(1, 8)]
    return {
        "label": label,
        "method": method,
        "seed": seed,
        "learning_rate": 1e-3,
        "trainable_parameters": trained,
        "total_parameters": 1_236_000_000 + (trained if method not in ("fft", "freeze") else 0),
        "steps": STEPS,
        "tokens_seen": 512 * 8192 * STEPS,
        "seconds": 4000.0 + trained / 4e5,
        "peak_memory_gib": 20 + trained / 4e7,
        "folder": f"{method}-{seed}",
        "roles": {"korean": "new", "english": "replay"},
        "before": figures(0, 0),
        "during": [
            {
                "step": round(part * STEPS),
                "figures": figures(learned * share, forgotten * (1.5 * share - 0.5 * share**4)),
            }
            for part, share in shares
        ],
        "after": figures(learned, forgotten),
    }


def rows(seeds: Sequence[int] = (1, 2, 3)) -> list[dict[str, Any]]:
    """All methods and seeds."""
    return [row(*method, seed) for method in METHODS for seed in seeds]


def write_study(folder: Path, content: Any) -> Path:
    """A study's folder with that summary."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "summary.json", content)
    return folder


def at_rates(content: Sequence[dict[str, Any]], factors: Sequence[float]) -> list[dict[str, Any]]:
    """The rows, and of the first seed also those at other rates.

    These learn and forget that many times as much.
    """
    found = []
    for row in content:
        for factor in factors if row["seed"] == content[0]["seed"] else (1.0,):
            far = {
                name: factor * math.log(row["after"][name]["perplexity"] / BEFORE[name])
                for name in BEFORE
            }
            rate, after = factor * row["learning_rate"], figures(-far["korean"], far["english"])
            found.append(
                row
                if factor == 1
                else row | {"learning_rate": rate, "after": after, "chosen": False}
            )
    return found


def answers() -> list[dict[str, Any]]:
    """A study of questions: what is left of Task 0's answers while Task 1 is learned."""

    def figures(done: float, lost: float) -> dict[str, dict[str, float]]:
        return {
            "task 1": {"perplexity": 60 * math.exp(-3 * done), "first_token_accuracy": 0.98 * done},
            "task 0": {
                "perplexity": 1.1 + lost,
                "first_token_accuracy": 1 - lost * done,
                "exact_match": 0.5,
            },
        }

    return [
        {
            **row(*method, seed),
            "roles": {"task 1": "new", "task 0": "replay"},
            "before": figures(0, 0),
            "during": [
                {"step": 250 * part, "figures": figures(part / 4, lost)} for part in (1, 2, 3)
            ],
            "after": figures(1, lost),
        }
        for method, lost in zip(
            (METHODS[0], METHODS[3], METHODS[6]), (0.85, 0.83, 0.3), strict=True
        )
        for seed in (1, 2)
    ]
