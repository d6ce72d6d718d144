"""Every shipped configuration and study describes runs that can start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checks.model_fit import check_fits
from pipeline.config.run import load_config
from pipeline.config.stage_plan import training_stages
from pipeline.deepspeed_config import accumulation_steps, load_deepspeed_config
from pipeline.model.from_hf import read_spec
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from studies.harness.runs import StudyRuns
from studies.harness.study import load_study

ROOT = Path(__file__).parents[1]
CONFIGURATIONS = sorted((ROOT / "configs").glob("*.yaml"))
STUDIES = sorted((ROOT / "studies" / "configs").glob("*.yaml"))
BASES = {
    "biography_rates": "neox-1m",
    "korean_llama3.2_1b": "llama-3.2-1b",
    "korean_ablations": "llama-1m",
    "korean_none": "llama-1m",
    "chat_plain": "llama-0.7m",
    "stages": "llama-1m",
    "frontier_long": "llama-1m",
    "frontier_longest": "llama-1m",
    "fp8": "llama-1m",
    "smollm2": "smollm2-135m",
    "smollm2_40k": "smollm2-135m",
}
CLUSTERS = (8, 16, 32, 64, 128)
RANKS = {
    "demo": (1, 2),
    "demo_fft": (1, 2),
    "demo_vocabulary": (1,),
    "demo_stages": (1,),
    "demo_rows_first": (1,),
    "cpt_korean_llama3.2_1b_stages": CLUSTERS,
    "cpt_korean_llama3.2_1b": CLUSTERS,
    "cpt_korean_llama3.1_8b": CLUSTERS,
    "cpt_korean_llama3.1_8b_instruct": CLUSTERS,
    "cpt_korean_qwen3_30b_a3b": CLUSTERS,
    "fineweb2_korean": (8,),
    "smollm2_korean": (1, 2),
    "smollm2_korean_same_vocabulary": (1, 2),
}


@pytest.fixture(autouse=True)
def project_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_is_a_run_that_fits_its_intended_ranks(path):
    config = load_config(path, base="named")
    assert config.folder.name.replace("-", "_") == path.stem
    for ranks in RANKS[path.stem]:
        layout = Layout(ranks, config.parallel.tp_size)
        for stage in training_stages(config):
            assert accumulation_steps(stage.config.schedule, layout.dp_size) >= 1
        load_deepspeed_config(config.deepspeed, layout)


@pytest.mark.parametrize("name", ["cpt_korean_llama3.1_8b", "cpt_korean_llama3.1_8b_instruct"])
def test_the_command_of_an_8b_asks_for_the_node_that_it_is_sized_for(name):
    path = f"configs/{name}.yaml"
    command = "sbatch --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 slurm/cpt_korean.sh"
    assert f"#   {command} {path}\n" in Path(path).read_text()


def test_the_8b_fits_on_eight_gpus_and_has_the_papers_proportions():
    config = load_config(ROOT / "configs" / "cpt_korean_llama3.1_8b.yaml")
    estimator = open_estimator(
        config, Cluster(8), base_config=ROOT / "configs" / "bases" / "llama-3.1-8b.json"
    )
    assert estimator.estimate(estimator.own_choice).fits(Cluster(8))
    base, added = estimator.spec.widths, config.method.expansion
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        assert getattr(added, name) * 8 == getattr(base, name)
    assert config.method.l_fp * 16 == 3 * estimator.spec.num_layers
    check_fits(config, estimator.spec)


@pytest.fixture(params=STUDIES, ids=lambda path: path.stem)
def runs(request, monkeypatch, tmp_path) -> StudyRuns:
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
        # The vocabulary is made by a command before the study: any number of new tokens will do.
        new_tokens = 0 if run.config.vocabulary is None else 2000
        check_fits(run.config, replace(spec, new_tokens=new_tokens))
