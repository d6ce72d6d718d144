"""The metrics of a long run: status, report and resuming from a metrics.jsonl of a million steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.growth import Row, in_own_process, measured, report
from pipeline.observers.metrics import MetricsFiles
from pipeline.run_folder.metrics import METRICS
from pipeline.run_folder.status import read_status
from pipeline.studies.report.page import page
from pipeline.studies.report.runs import read_runs
from pipeline.training.observer import StepEvent

GOALS = {"status_cpu_s": 1, "report_cpu_s": 30, "report_peak_mib": 1000, "resume_cpu_s": 1, "resume_peak_mib": 100}
_FIGURES = {f"seconds/{name}": 0.123456789 for name in ("data", "forward", "backward", "step", "communication")} | {
    f"norm/{number:02d}": 1.23456789 for number in range(16)
}
_SCORES = {f"{name}/{corpus}": 1.23456789 for name in ("perplexity", "bits_per_byte") for corpus in ("ko", "en")}


def make_run(folder: Path, steps: int) -> None:
    """A run folder with a line for each step."""
    folder.mkdir(parents=True)
    common = {"loss": 2.345678, "learning_rate": 3e-4, "tokens_per_second_per_gpu": 12345.6, **_FIGURES}
    line, scores = json.dumps(common)[1:], json.dumps({**common, **_SCORES, "forgetting/en": 0.01})[1:]
    every = max(1, steps // 1000)
    with (folder / METRICS).open("w", encoding="ascii") as file:
        for step in range(steps + 1):
            file.write(f'{{"step": {step}, {line if step % every else scores}\n')


def read(folder: Path) -> Row:
    """What `scale-cpt status` and `scale-cpt report` do."""
    row: Row = {"metrics_mib": round((folder / METRICS).stat().st_size / 2**20, 1)}
    with measured(row, "status_"):
        read_status(folder)
    with measured(row, "report_"):
        page(read_runs([folder]), "report")
    return row


def resume(folder: Path, steps: int) -> Row:
    """What the observer on rank 0 does when a run resumes 100 steps back, and then at a step."""
    row: Row = {}
    with measured(row, "resume_"):
        metrics = MetricsFiles(folder, steps - 100)
    with measured(row, "a_step_"):
        metrics.on_step(StepEvent(steps, 0, None, _FIGURES))
    return row


def measure(scratch: Path, smallest: bool) -> Iterator[Row]:
    """A table over the number of steps."""
    rows = []
    for steps in (1_000, 2_000) if smallest else (250_000, 500_000, 1_000_000):
        folder = scratch / str(steps)
        make_run(folder, steps)
        rows.append({"steps": steps, **in_own_process(read, folder), **in_own_process(resume, folder, steps)})
    yield report("Metrics: a line for each step", rows, GOALS)
