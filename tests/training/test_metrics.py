"""metrics.jsonl and TensorBoard hold each step once, whatever happened to earlier attempts."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.training.metrics import FILE, Metrics, read_metrics


def write(folder, resumed_from, values):
    metrics = Metrics(folder, resumed_from, writer=True)
    for step, value in values.items():
        metrics.write(step, {"loss": value})
    metrics.close()


def test_steps_after_the_checkpoint_are_written_anew(tmp_path):
    write(tmp_path, 0, {0: 9.0, 1: 5.0, 2: 4.0, 3: 3.0})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    write(tmp_path, 2, {3: 2.5, 4: 2.0})

    expected = {0: 9.0, 1: 5.0, 2: 4.0, 3: 2.5, 4: 2.0}
    assert {line["step"]: line["loss"] for line in read_metrics(tmp_path / FILE)} == expected
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(expected)


def test_a_run_that_never_saved_begins_anew(tmp_path):
    write(tmp_path, 0, {0: 9.0, 1: 5.0})
    write(tmp_path, 0, {0: 9.0, 1: 4.0})
    assert read_metrics(tmp_path / FILE) == [{"step": 0, "loss": 9.0}, {"step": 1, "loss": 4.0}]


def test_only_the_writer_writes(tmp_path):
    metrics = Metrics(tmp_path / "run", 0, writer=False)
    metrics.write(1, {"loss": 1.0})
    metrics.close()
    assert not (tmp_path / "run").exists()
