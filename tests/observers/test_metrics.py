"""metrics.jsonl and TensorBoard hold each step once, whatever happened to earlier attempts."""

from __future__ import annotations

import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.observers.metrics import BOARD, MetricsFiles
from pipeline.run_folder.metrics import METRICS, read_metrics
from pipeline.training.observer import StepEvent


def write(folder, resumed_from, values):
    metrics = MetricsFiles(folder, resumed_from)
    for step, value in values.items():
        metrics.on_step(StepEvent(step, 0, None, {"loss": value}))
    metrics.on_end(finished=True)


def test_steps_after_the_checkpoint_are_written_again_and_a_damaged_line_costs_no_other(tmp_path):
    write(tmp_path, 0, {0: 9.0, 1: 5.0, 2: 4.0, 3: 3.0})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    write(tmp_path, 2, {3: 2.5, 4: 2.0})
    expected = {0: 9.0, 1: 5.0, 2: 4.0, 3: 2.5, 4: 2.0}
    assert {line["step"]: line["loss"] for line in read_metrics(tmp_path / METRICS)} == expected
    events = EventAccumulator(str(tmp_path / BOARD / tmp_path.name)).Reload()
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(expected)

    lines = (tmp_path / METRICS).read_text().splitlines(keepends=True)
    (tmp_path / METRICS).write_text("".join([lines[0], lines[1][:9] + "\n", *lines[2:]]))
    write(tmp_path, 2, {3: 2.5})
    assert [line["step"] for line in read_metrics(tmp_path / METRICS)] == [0, 2, 3]
    write(tmp_path, 0, {0: 9.0})  # it never saved
    assert read_metrics(tmp_path / METRICS) == [{"step": 0, "loss": 9.0}]


def test_a_run_that_begins_again_keeps_the_figures_of_its_earlier_attempts(tmp_path, caplog):
    write(tmp_path, 0, {0: 9.0, 1: 5.0})
    write(tmp_path, 0, {0: 9.0, 1: 4.0})
    write(tmp_path, 0, {0: 9.0})
    write(tmp_path, 0, {0: 9.0, 1: 3.0})
    assert [line["loss"] for line in read_metrics(tmp_path / METRICS)] == [9.0, 3.0]
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl.1")] == [9.0, 5.0]
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl.2")] == [9.0, 4.0]
    assert not (tmp_path / "metrics.jsonl.3").exists(), "the reference alone is no progress"
    assert (
        "metrics.jsonl: the run begins at step 0; the figures of its earlier attempt are in "
        "metrics.jsonl.1" in (caplog.text)
    )


def test_a_rollback_drops_later_figures(tmp_path):
    metrics = MetricsFiles(tmp_path, 0)
    for step in (0, 1, 2, 3, 4):
        metrics.on_step(StepEvent(step, 0, None, {"loss": float(step)}))
    metrics.on_rollback(2)
    metrics.on_step(StepEvent(3, 0, None, {"loss": 9.0}))
    metrics.on_end(finished=True)
    assert [line["loss"] for line in read_metrics(tmp_path / METRICS)] == [0.0, 1.0, 2.0, 9.0]
    events = EventAccumulator(str(tmp_path / BOARD / tmp_path.name)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 9.0),
    ]


def test_a_full_disk_loses_no_line(small_disk, caplog):
    threads = set(threading.enumerate())
    disk = small_disk(mib=1)
    metrics = MetricsFiles(disk.path, 0)
    figures = {
        f"figure/{number}": number / 7 for number in range(40)
    }  # a line longer than what the disk gives out
    for step in range(8):
        if step == 2:
            disk.fill()
        if step == 6:
            disk.free()
        metrics.on_step(StepEvent(step, 0, None, figures))
        if step == 5:
            assert len(read_metrics(disk.path / METRICS)) < 6
    metrics.on_end(finished=True)
    assert [line["step"] for line in read_metrics(disk.path / METRICS)] == list(range(8))
    events = EventAccumulator(str(disk.path / BOARD / disk.path.name)).Reload()
    assert [event.step for event in events.Scalars("figure/7")] == list(range(8))
    assert set(threading.enumerate()) == threads, "a writer's thread would fail in a later test"
    assert [record.message.count("No space left on device") for record in caplog.records] == [1]


def test_tensorboard_finds_the_run_by_its_name_and_goes_on_where_an_earlier_version_began(tmp_path):
    write(tmp_path / "demo", 0, {0: 9.0})
    assert [path.name for path in (tmp_path / "demo" / BOARD).iterdir()] == ["demo"]
    old = tmp_path / "old"
    (old / BOARD).mkdir(parents=True)
    (old / BOARD / "events.out.tfevents.1").touch()
    write(old, 0, {0: 9.0})
    assert all(path.is_file() for path in (old / BOARD).iterdir())
