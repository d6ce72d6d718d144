"""A run on a hosted base through its stages: self-generated text, expansion, training; and what it
refuses by name.
"""

from __future__ import annotations

import shutil

import pytest

from pipeline.checks.dry_run.make_plan import make_plan
from pipeline.config.run import load_config
from pipeline.errors import BaseModelError, ConfigError
from pipeline.methods.build_model import build_model
from pipeline.model.bases import open_base
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.cluster import Cluster
from tests.distributed import run_ranks
from tests.extensions.hosted.bases import save_hosted
from tests.extensions.hosted.test_gate import ADAPT
from tests.files import change_json
from tests.programs import scale_cpt
from tests.training.runs import losses, make_run, train, write_config


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    return save_hosted("granite", tmp_path_factory.mktemp("bases") / "granite")


def test_the_stages_of_a_run_on_a_base_that_no_family_of_ours_reads(granite, tokens, tmp_path):
    texts = shutil.copytree(tokens, tmp_path / "tokens")
    own = {"role": "self_generated", "sample": {"tokens": 400}}
    path = write_config(
        tmp_path / "run",
        texts,
        zero=2,
        base=str(granite),
        method=ADAPT,
        data__corpora__own=own,
        preflight__enabled=True,
    )
    plan = make_plan(load_config(path), Cluster(gpus=2, gpus_per_node=2))
    assert plan.faults == []
    assert "vLLM does not: it has a hosted base" in dict(plan.rows)["serving"]
    assert dict(plan.rows)["batch"] == "256 tokens a step, 2 micro-batches a rank"
    for stage in ("sample", "upscale"):
        done = scale_cpt(stage, path)
        assert done.returncode == 0, done.stderr
    assert run_ranks(train, 2, path) == [0, 0]
    assert len(losses(tmp_path / "run")) == 6


def test_a_hosted_run_trains_in_two_stages(granite, tokens, tmp_path):
    stages = [
        {"name": "rest", "steps": 2, "trains": ["base_to_expansion"]},
        {"name": "all", "steps": 2},
    ]
    path = make_run(
        tmp_path / "run",
        tokens,
        zero=1,
        base=str(granite),
        method=ADAPT,
        schedule__steps=4,
        stages=stages,
        preflight__enabled=True,
    )
    plan = make_plan(load_config(path), Cluster(gpus=2, gpus_per_node=2))
    assert plan.faults == []
    assert run_ranks(train, 2, path) == [0, 0]
    assert len(losses(tmp_path / "run")) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"name": "fft"}}, "method.name: expected scale or lora"),
        ({"method": {**ADAPT, "variant": "route"}}, "method.variant: expected preserve or adapt"),
        ({"method": {**ADAPT, "norm": "base"}}, "method.norm: expected separate"),
        (
            {"recomputation_keeps": "attention", "activation_checkpointing": "all"},
            "recomputation_keeps",
        ),
        (
            {"method": {**ADAPT, "l_fp": 0}, "gate": {"tokens": 100}},
            "gate.layer: expected at most method.l_fp",
        ),
        (
            {"method": {"name": "lora", "rank": 2, "target_modules": ["query"]}},
            "method.target_modules: names maps of native families",
        ),
        (
            {"method": {"name": "lora", "rank": 2}, "gate": {"tokens": 100}},
            "gate.layer: expected at most method.open_first_layer",
        ),
        ({"compile": True}, "compile: expected false"),
        ({"parallel__tp_size": 2}, "parallel.tp_size: expected 1 .* family: llama, "),
    ],
)
def test_what_a_hosted_base_cannot_have_is_refused_by_name(
    granite, tokens, tmp_path, changes, message
):
    config = load_config(write_config(tmp_path, tokens, base=str(granite), **changes))
    with pytest.raises(ConfigError, match=message):
        build_model(config, open_base(granite).spec, SINGLE)


def test_the_base_must_be_one_that_transformers_has(granite, tmp_path):
    for model_type in ("granite2", None, "bert"):
        folder = shutil.copytree(granite, tmp_path / str(model_type))
        change_json(folder / "config.json", model_type=model_type)
        with pytest.raises(BaseModelError, match=r"model_type|not causal"):
            open_base(folder)


def test_native_code_is_the_default_where_a_family_fits(tmp_path, granite):
    llama = save_hosted("llama", tmp_path / "llama")
    assert type(open_base(llama)).__name__ == "BaseFolder"
    assert type(open_base(llama, "transformers")).__name__ == "HostedFolder"
    with pytest.raises(BaseModelError, match="model_type 'granite' is not among"):
        open_base(granite, "native")
