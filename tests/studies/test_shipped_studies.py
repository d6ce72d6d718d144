"""Every study that the project ships describes runs that can start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checks.inputs import check_fits
from pipeline.deepspeed_config import accumulation_steps, load_deepspeed_config
from pipeline.model.from_hf import read_spec
from pipeline.parallel.topology import Layout
from pipeline.studies.runs import StudyRuns
from pipeline.studies.study import load_study

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
BASES = {
    "biography_rates": "neox-1m",
    "korean_llama3.2_1b": "llama-3.2-1b",
    "korean_ablations": "llama-1m",
    "korean_none": "llama-1m",
    "chat_plain": "llama-0.7m",
    "chat_plain_quick": "llama-0.7m",
}


@pytest.fixture(params=STUDIES, ids=lambda path: path.stem)
def runs(request, monkeypatch, tmp_path) -> StudyRuns:
    monkeypatch.chdir(ROOT)
    study = StudyRuns(load_study(request.param, tmp_path), str(request.param))
    if name := BASES.get(request.param.stem):
        architecture = Path("configs/bases") / f"{name}.json"
    else:
        architecture = study.study.scratch.architecture if study.study.scratch else study.study.base
    # The architecture is enough, and known before the base is trained.
    monkeypatch.setattr(study, "base", architecture)
    return study


def test_its_runs_fit_the_ranks_they_are_made_for(runs):
    study = runs.study
    trials = [runs.compared(name, 1.0, 1) for name in study.methods]
    made_for = [stage.ranks for stage in study.stages.values()]
    for run, ranks in [*zip(runs.stages, made_for, strict=True), (trials[0], study.ranks)]:
        layout = Layout(ranks, run.config.parallel.tp_size)
        assert accumulation_steps(run.config.schedule, layout.dp_size) >= 1
        load_deepspeed_config(run.config.deepspeed, layout)
    spec = read_spec(runs.base)
    for run in trials:
        check_fits(run.config, spec)
