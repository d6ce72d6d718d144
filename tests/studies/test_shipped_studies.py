"""Every study that the project ships describes runs that can start."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline.studies.study_runs import StudyRuns, Trial

from pipeline.config.method import ScaleMethod
from pipeline.deepspeed_config import accumulation_steps, load_deepspeed_config
from pipeline.model.from_hf import read_spec
from pipeline.parallel.topology import Layout
from pipeline.sizing.matching import trained_parameters
from pipeline.studies.study import load_study

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
BASES = {
    "biography_rates": "neox-1m",
    "korean_llama3.2_1b": "llama-3.2-1b",
    "korean_ablations": "llama-1m",
    "korean_none": "llama-1m",
}


@pytest.fixture(params=STUDIES, ids=lambda path: path.stem)
def runs(request, monkeypatch, tmp_path) -> StudyRuns:
    monkeypatch.chdir(ROOT)
    study = StudyRuns(load_study(request.param, tmp_path), str(request.param))
    if name := BASES.get(request.param.stem):
        architecture = Path("configs/bases") / f"{name}.json"
    else:
        architecture = study.study.scratch.architecture
    # The architecture is enough, and known before the base is trained.
    monkeypatch.setattr(study, "base", architecture)
    return study


def of_experiment(name: str) -> pytest.MarkDecorator:
    """The studies of one experiment of the paper."""
    own = [path for path in STUDIES if path.stem.startswith(name)]
    assert own, name
    return pytest.mark.parametrize("runs", own, ids=lambda path: path.stem, indirect=True)


def test_its_runs_fit_the_ranks_they_are_made_for(runs):
    study = runs.study
    trials = [runs.trial(Trial(name, 1.0, 1)) for name in study.methods]
    made_for = [stage.ranks for stage in study.stages.values()]
    for run, ranks in [*zip(runs.stages, made_for, strict=True), (trials[0], study.ranks)]:
        layout = Layout(ranks, run.config.parallel.tp_size)
        assert accumulation_steps(run.config.schedule, layout.dp_size) >= 1
        load_deepspeed_config(run.config.deepspeed, layout)
    spec = read_spec(runs.base)
    for run in trials:
        assert trained_parameters(run.config.method, spec) > 0


@of_experiment("biography")
def test_shares_of_the_biographies_are_the_papers(runs):
    spec, scale = read_spec(runs.base), runs.methods["route"]
    assert 6 * scale.expansion.hidden_size == spec.widths.hidden_size
    assert 24 * scale.expansion.intermediate_size == spec.widths.intermediate_size
    assert scale.l_fp == spec.num_layers - 1
    assert 3 * runs.methods["llama_pro"].added_layers == spec.num_layers
    assert list(runs.methods) == ["fft", "llama_pro", "lora", "preserve", "adapt", "route"]
    assert all(corpus.prompt_key for corpus in runs.trial(Trial("fft", 1.0, 1)).config.data.corpora.values())


@of_experiment("korean")
def test_shares_are_the_papers(runs):
    spec = read_spec(runs.base)
    expansion = runs.methods["adapt"].expansion
    assert isinstance(runs.methods["adapt"], ScaleMethod)
    assert (8 * expansion.hidden_size, 8 * expansion.intermediate_size, 8 * expansion.num_attention_heads) == (
        spec.widths.hidden_size,
        spec.widths.intermediate_size,
        spec.widths.num_attention_heads,
    )
    assert runs.methods["adapt"].l_fp == round(spec.num_layers * 3 / 16)
    if "freeze" in runs.methods:
        assert runs.methods["llama_pro"].added_layers * 4 == spec.num_layers
        assert runs.methods["freeze"].frozen_layers == runs.methods["adapt"].l_fp
