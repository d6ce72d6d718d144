"""Run folders and studies, and configurations in YAML and JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

from pipeline.config.run import load_config
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.errors import LOST_RANK
from pipeline.files import write_json
from pipeline.parallel.topology import Layout
from pipeline.run_folder.attempts import decide, record_end, record_start
from pipeline.run_folder.lock import RunLock
from pipeline.run_folder.status import as_lines, as_text, read_status, runs_in
from pipeline.studies.report.page import page
from pipeline.studies.report.runs import read_runs
from pipeline.studies.study import load_study
from tests.fuzz.subject import INPUT, Subject
from tests.studies.report.studies import rows, write_study, write_tried

_PROJECT = Path(__file__).parents[2]


def _make_run() -> None:
    shutil.copy(_PROJECT / "configs" / "demo.yaml", "run.yaml")
    config = load_config(Path("run.yaml")).model_copy(update={"folder": INPUT})
    with patch.dict(os.environ, {"ATTEMPT": "7.0", "SLURM_JOB_ID": "7"}):
        record_start(config, 2, 0)
        record_end(INPUT, exit_code=LOST_RANK, step=4, error="rank 1 died")
    with patch.dict(os.environ, {"ATTEMPT": "7.1"}):
        record_start(config, 2, 4)
    held = {"perplexity/korean": 9.0, "bits_per_byte/korean": 1.0, "perplexity/english": 3.0}
    lines = [{"step": step, "loss": 3.0, **(held if step % 4 == 0 else {})} for step in range(9)]
    (INPUT / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = {"trainable_parameters": 10, "total_parameters": 20, "tokens_seen": 800, "seconds": 9.5}
    write_json(INPUT / "training.json", figures | {"steps": 8, "name": "fuzz"})
    (INPUT / "checkpoints" / "step_00000008").mkdir(parents=True)
    write_json(INPUT / "checkpoints" / "step_00000008" / "manifest.json", {"step": 8})
    (INPUT / "checkpoints" / "latest").write_text("step_00000008\n")


def _status() -> None:
    text = as_text(read_status(INPUT))
    found = [read_status(folder) for folder in runs_in(INPUT.parent)]
    assert text and (not found or as_lines(found))


def _report() -> None:
    assert page(read_runs([INPUT]), "title")


def _retry() -> None:
    with patch.dict(os.environ, {"ATTEMPT": "7.1"}):
        decide(INPUT, stage="train", exit_code=LOST_RANK, without_progress=3, most=9)


def _take_lock() -> None:
    with RunLock(INPUT, stale_after_s=0.0):
        pass


def _make_study() -> None:
    content = rows(seeds=(1,))[:3]
    write_study(INPUT, content)
    write_tried(INPUT, content, (0.5, 1.0))


def _make_config(source: str) -> None:
    INPUT.mkdir()
    shutil.copy(_PROJECT / source, INPUT)


_CONFIGS: dict[str, Callable[[Path], object]] = {
    "configs/demo.yaml": lambda path: load_config(path).model_dump_json(),
    "configs/cpt_korean_llama3.2_1b.yaml": lambda path: load_config(path).model_dump_json(),
    "configs/studies/korean.yaml": lambda path: load_study(path, _PROJECT / "data"),
    "ds_configs/zero1.json": lambda path: load_deepspeed_config(path, Layout(2, 1)),
}


def _load(source: str) -> None:
    _CONFIGS[source](INPUT / Path(source).name)


SUBJECTS = [
    *(Subject("run folders", read.__name__, _make_run, read) for read in (_status, _report, _retry, _take_lock)),
    Subject("run folders", "report of a study", _make_study, _report),
    *(
        Subject("configurations", Path(name).name, partial(_make_config, name), partial(_load, name))
        for name in _CONFIGS
    ),
]
