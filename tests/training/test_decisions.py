"""What steers a run is decided once: ranks that measure different numbers do the same, and end together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import yaml

from tests.distributed import run_ranks
from tests.training.runs import make_run, metrics, prepared, start_deepspeed, train, trained


def without_replay(folder: Path, tokens: Path, **changes: Any) -> Path:
    """A run without held-out replay: its diagnostics probe training batches, which differ by rank."""
    path = make_run(folder, tokens, zero=1, schedule__learning_rate=2e-2, validation__every_steps=1, **changes)
    values = yaml.safe_load(path.read_text())
    del values["data"]["corpora"]["english"]["heldout_input"]
    path.write_text(yaml.safe_dump(values))
    return path


def steered(config: Path) -> list[tuple[float, float]]:
    """The KL and the learning rate's factor after each validation, and at the end this rank's own KL."""
    trainer = prepared(config)
    from pipeline.observers import diagnostics
    from pipeline.training.observer import Observer

    found, own = [], []

    class Recorder(Observer):
        def on_validation(self, event: Any) -> None:
            found.append((event.figures["kl_from_base/training"], event.position.learning_rate_factor))

    original = diagnostics.kl_and_logit_gradient_

    def recorded(*arguments: Any, **columns: Any) -> Any:
        kl, gradient = original(*arguments, **columns)
        own.append(float(kl.sum()))
        return kl, gradient

    trainer.observers.append(Recorder())
    with patch.object(diagnostics, "kl_and_logit_gradient_", recorded):
        trained(trainer)
    return [*found, (own[-1], 0.0)]


def test_ranks_with_different_probes_lower_the_rate_together(tokens, tmp_path):
    budget = {"max_kl_from_base": 1e-3, "action": "lower_learning_rate"}
    config = without_replay(tmp_path, tokens, schedule__steps=3, forgetting=budget)
    first, second = run_ranks(steered, 2, config)
    assert first[:-1] == second[:-1]
    assert first[-2][1] < 1
    assert first[-1] != second[-1]  # otherwise their own numbers would have agreed too


def train_with_a_wrong_norm(config: Path) -> int:
    """Rank 1 reads gradient norms that look like a spike."""
    start_deepspeed()
    from pipeline.training.engine import Engine

    wrong = PropertyMock(side_effect=[1.0, 1.0, 1.0] + [1e9] * 99)
    if os.environ["RANK"] == "0":
        return train(config)
    with patch.object(Engine, "gradient_norm", wrong):
        return train(config)


def test_one_rank_alone_finds_no_spike(tokens, tmp_path):
    stability = {"window": 2, "spike_steps": 2, "loss_increase": 1.0}
    config = make_run(tmp_path, tokens, zero=1, checkpoints__every_steps=2, stability=stability)
    assert run_ranks(train_with_a_wrong_norm, 2, config) == [0, 0]
    assert not any("rollbacks" in line for line in metrics(tmp_path))
