"""Run folders and studies, and configurations in YAML and JSON."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

from pipeline.config.run import load_config
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.errors import LOST_RANK
from pipeline.experiments.report.page import page
from pipeline.experiments.report.runs import read_runs
from pipeline.experiments.study import load_study
from pipeline.files import write_json
from pipeline.parallel.topology import Layout
from pipeline.run_folder import lock
from pipeline.run_folder.attempts import decide, record_end, record_stage, record_start
from pipeline.run_folder.lock import RunLock, read_lock_owner
from pipeline.run_folder.metrics import peak_memory_gib, read_metrics
from pipeline.run_folder.status import as_lines, as_text, read_status, runs_in
from tests.experiments.report.studies import rows, write_study, write_tried
from tests.fuzz.subject import INPUT, Subject

_PROJECT = Path(__file__).parents[2]


def _make_run() -> None:
    shutil.copy(_PROJECT / "configs" / "demo.yaml", "run.yaml")
    config = load_config(Path("run.yaml")).model_copy(update={"folder": INPUT})
    with patch.dict(os.environ, {"ATTEMPT": "7.0", "SLURM_JOB_ID": "7"}):
        record_stage(INPUT, "tokenize")
        record_end(INPUT, exit_code=0, stage="tokenize")
        record_start(config, 2, 0)
        record_end(INPUT, exit_code=LOST_RANK, step=4, error="rank 1 died")
    with patch.dict(os.environ, {"ATTEMPT": "7.1"}):
        record_start(config, 2, 4)
    lines = []
    for step in range(0, 9):
        held = {"perplexity/korean": 9.0 - step / 10, "bits_per_byte/korean": 1.0, "perplexity/english": 3.0}
        line = {"step": step, "loss": 3.0 - step / 10, "tokens_per_second_per_gpu": 100.0, "skipped_steps": 0}
        lines.append(json.dumps(line | (held if step % 4 == 0 else {})))
    (INPUT / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    figures = {"trainable_parameters": 10, "total_parameters": 20, "tokens_seen": 800, "seconds": 9.5}
    write_json(INPUT / "training.json", figures | {"steps": 8, "name": "fuzz"})
    for step in (4, 8):
        checkpoint = INPUT / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        write_json(checkpoint / "manifest.json", {"step": step})
    (INPUT / "checkpoints" / "latest").write_text("step_00000008\n")
    with RunLock(INPUT):
        shutil.copy(lock.lock_path(INPUT), "lock")
    shutil.move("lock", lock.lock_path(INPUT))


def _status() -> dict[str, str]:
    text = as_text(read_status(INPUT))
    found = [read_status(folder) for folder in runs_in(INPUT.parent)]
    assert text and (not found or as_lines(found))
    return {}


def _report() -> dict[str, str]:
    assert page(read_runs([INPUT]), "title")
    return {}


def _retry() -> dict[str, str]:
    with patch.dict(os.environ, {"ATTEMPT": "7.1"}):
        decide(INPUT, stage="train", exit_code=LOST_RANK, without_progress=3, most=9)
    return {}


def _take_lock() -> dict[str, str]:
    read_lock_owner(lock.lock_path(INPUT))
    with RunLock(INPUT, stale_after_s=0.0):
        time.sleep(0.01)
    return {}


def _figures() -> dict[str, str]:
    peak_memory_gib(read_metrics(INPUT / "metrics.jsonl"))
    return {}


def _make_study() -> None:
    content = rows(seeds=(1,))[:3]
    write_study(INPUT, content)
    write_tried(INPUT, content, (0.5, 1.0))


def _make_config(source: str) -> None:
    INPUT.mkdir()
    shutil.copy(_PROJECT / source, INPUT)


def _config(name: str) -> dict[str, str]:
    load_config(INPUT / name).model_dump_json()
    return {}


def _study(name: str) -> dict[str, str]:
    load_study(INPUT / name, _PROJECT / "data")
    return {}


def _deepspeed(name: str) -> dict[str, str]:
    load_deepspeed_config(INPUT / name, Layout(2, 1))
    return {}


def _subjects() -> Iterator[Subject]:
    uses: dict[str, Callable[[], dict[str, str]]] = {
        "status": _status,
        "report": _report,
        "retry": _retry,
        "lock": _take_lock,
        "metrics": _figures,
    }
    for name, read in uses.items():
        yield Subject("run folders", name, _make_run, read)
    yield Subject("run folders", "report of a study", _make_study, _report)
    configs = ("configs/demo.yaml", "configs/cpt_korean_llama3.2_1b.yaml")
    readers = [(source, _config) for source in configs]
    readers += [("configs/studies/korean.yaml", _study), ("configs/studies/biography.yaml", _study)]
    readers += [
        (str(path.relative_to(_PROJECT)), _deepspeed) for path in sorted(_PROJECT.glob("ds_configs/*.json"))[:2]
    ]
    for source, reader in readers:
        name = Path(source).name
        yield Subject("configurations", name, partial(_make_config, source), partial(reader, name))


SUBJECTS = list(_subjects())
