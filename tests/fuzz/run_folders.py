"""Run folders, which many processes write and users copy: status, retries, locks, metrics and
reports."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

from pipeline.config.run import load_config
from pipeline.errors import LOST_RANK
from pipeline.files.json_files import write_json
from pipeline.run_folder.attempts import record_end, record_start, record_training
from pipeline.run_folder.lock import RunLock
from pipeline.run_folder.retry import decide_retry
from pipeline.run_folder.run_file import write_run
from pipeline.run_folder.status import as_lines, as_text, read_status
from studies.report.page import page
from studies.report.results import read_runs
from tests.data.helpers import PROJECT
from tests.fuzz.runner import INPUT, Subject
from tests.studies.report.studies import rows, write_study


def _make_run() -> None:
    """A run that lost a rank and was started again."""
    config = load_config(PROJECT / "configs" / "demo.yaml").model_copy(update={"folder": INPUT})
    with patch.dict(os.environ, {"ATTEMPT": "7.0"}):
        record_start(INPUT, "tokenize")
        record_training(config, 2, 0)
        record_end(INPUT, exit_code=LOST_RANK, step=4, error="rank 1 died")
    with patch.dict(os.environ, {"ATTEMPT": "7.1"}):
        record_training(config, 2, 4)
    lines = []
    for step in range(9):
        line = {"step": step, "loss": 3.0, "seconds": 1.5, "tokens_per_second_per_gpu": 800.0}
        if step % 4 == 0:
            line |= {
                "perplexity/korean": 9.0,
                "bits_per_byte/korean": 1.0,
                "perplexity/english": 3.0,
            }
        lines.append(json.dumps(line))
    (INPUT / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name in ("step_00000004", "step_00000008"):
        (INPUT / "checkpoints" / name).mkdir(parents=True)
        write_json(INPUT / "checkpoints" / name / "manifest.json", {"step": 8})
    (INPUT / "checkpoints" / "latest").write_text("step_00000008\n", encoding="utf-8")


def _make_locked_run() -> None:
    """The same, and its training was killed while it held the lock."""
    _make_run()
    with RunLock(INPUT):
        shutil.copy(INPUT / "training.lock", "lock")
    shutil.move("lock", INPUT / "training.lock")


def _make_study() -> None:
    write_study(INPUT, rows(seeds=(1,))[:3])


def _status() -> None:
    status = read_status(INPUT)
    as_text(status)
    as_lines([status])


def _retry() -> None:
    with patch.dict(os.environ, {"ATTEMPT": "7.1"}):
        decide_retry(INPUT, stage="train", exit_code=LOST_RANK, without_progress=3, most=9)


def _start_again() -> None:
    write_run(load_config(INPUT / "run.yaml").model_copy(update={"folder": INPUT}))


def _report() -> None:
    page(read_runs([INPUT]), "title")


def _take_lock() -> None:
    lock = INPUT / "training.lock"
    if lock.exists():
        an_hour_ago = time.time() - 3600
        os.utime(
            lock, (an_hour_ago, an_hour_ago)
        )  # an owner that cannot be read is waited for while it is new
    with RunLock(INPUT):
        pass


_READERS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "status": (_make_run, _status),
    "status of a killed run": (_make_locked_run, _status),
    "retry": (_make_run, _retry),
    "run.yaml": (_make_run, _start_again),
    "lock": (_make_locked_run, _take_lock),
    "report of a run": (_make_run, _report),
    "report of a study": (_make_study, _report),
}


def subjects() -> Iterator[Subject]:
    for name, (make, read) in _READERS.items():
        yield Subject("run folders", name, make, read)
