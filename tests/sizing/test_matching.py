"""Methods with equally many trained parameters: the size that is found is the best one, and can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pipeline.config.run import load_config
from pipeline.model.from_hf import read_spec
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.sizing.matching import MethodName, candidates, grown, matched, trained_parameters
from tests.bases import STORIES
from tests.training.runs import write_config

LLAMA_1B = Path(__file__).parents[2] / "configs" / "bases" / "llama-3.2-1b.json"


@pytest.fixture
def run(tmp_path):
    """The configuration of a run on stories260K with some of its settings changed."""
    return lambda **changes: load_config(write_config(tmp_path, tmp_path, **changes))


@pytest.mark.parametrize("method", [{"name": "lora", "rank": 1}, {"name": "lora", "rank": 40}, {"name": "fft"}])
@pytest.mark.parametrize("name", get_args(MethodName))
def test_no_other_size_comes_closer(run, name, method):
    spec, config = read_spec(STORIES), run(method=method)
    target = trained_parameters(config.method, spec)
    sizes, of_size = candidates(name, config, spec)
    counts = [trained_parameters(of_size(size), spec) for size in sizes]
    assert counts == sorted(counts)
    found = trained_parameters(matched(name, config, spec), spec)
    assert abs(found - target) == min(abs(count - target) for count in counts)


def test_widths_grow_in_the_papers_ratio(run):
    """Llama-3.2-1B: 2048 to 2304, 8192 to 9216, 32 to 36 heads, 3 of 16 layers without W12."""
    spec, config = read_spec(LLAMA_1B), run(method={"name": "lora", "rank": 8})
    method = grown("adapt", 256, config, spec, unpadded=False)
    assert method.expansion.model_dump() == {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    assert method.l_fp == 3


def test_the_runs_own_settings_are_kept_and_a_stock_export_needs_no_zeros(run):
    spec = read_spec(STORIES)
    config = run(method__norm="base", method__collaborative_modules="both", method__l_fp=2)
    preserve, route = (matched(name, config, spec) for name in ("preserve", "route"))
    assert preserve.norm == route.norm == "base"
    assert (preserve.l_fp, route.l_fp, route.collaborative_modules) == (None, 2, "both")
    for norm in ("base", "separate"):
        _, of_size = candidates("preserve", run(method__norm=norm), spec)
        widths = [of_size(size).expansion for size in range(8, 65, 8)]
        whole = [(64 + it.hidden_size, 8 + it.num_attention_heads) for it in widths]
        assert all(hidden % heads == 0 for hidden, heads in whole) == (norm == "base")
    config = run(method={"name": "lora", "rank": 8, "alpha": 16, "target_modules": ["query", "down"]})
    lora = matched("lora", config, spec)
    assert lora == config.method


@pytest.mark.parametrize("name", ["llama_pro", "route"])
def test_the_section_can_be_trained_on_several_ranks(run, name):
    spec = read_spec(STORIES)
    method = matched(name, run(parallel__tp_size=4), spec)
    changed = run(method=method.model_dump(mode="json"), parallel__tp_size=4)
    assert changed.method == method
    estimator = open_estimator(changed, Cluster(gpus=4))
    estimator.estimate(estimator.own_choice)
    assert estimator.parameters.trained == trained_parameters(method, spec)
