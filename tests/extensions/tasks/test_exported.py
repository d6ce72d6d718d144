"""Benchmarks of an exported model."""

from __future__ import annotations

from pipeline.extensions.tasks.benchmarks import benchmark_model, load_tasks, task_results
from tests.extensions.tasks.task_files import write_task_files


def test_an_exported_model_answers_benchmarks(exports, tmp_path):
    """In the scale format too, whose code is not part of transformers."""
    model = benchmark_model(exports("stories260K", "adapt separate")[0])
    found = task_results(model, load_tasks(["arc"], include=write_task_files(tmp_path)))
    assert [(result.metric, result.documents) for result in found] == [("acc", 6), ("acc_norm", 6)]
