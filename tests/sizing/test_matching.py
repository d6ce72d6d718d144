"""Methods with equally many trained parameters: the size that is found is the best one, and can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pipeline.config.run import load_config
from pipeline.model.from_hf import read_spec
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.sizing.matching import Matcher, MethodName
from tests.bases import STORIES
from tests.training.runs import write_config

ROOT = Path(__file__).parents[2]
LLAMA_1B = ROOT / "configs" / "bases" / "llama-3.2-1b.json"


@pytest.fixture
def run(tmp_path):
    """The configuration of a run on stories260K with some of its settings changed."""
    return lambda **changes: load_config(write_config(tmp_path, tmp_path, **changes))


@pytest.mark.parametrize("target", [1, 40_000, 150_000, 10**9])
@pytest.mark.parametrize("name", get_args(MethodName))
def test_no_other_size_comes_closer(run, name, target):
    matcher = Matcher(run(), read_spec(STORIES))
    (match,) = matcher.match([name], target)
    family = matcher.family(name)
    counts = [matcher.trained(family.of_size(size)) for size in family.sizes]
    assert counts == sorted(counts)
    assert abs(match.trained - target) == min(abs(count - target) for count in counts)
    assert match.off == pytest.approx((match.trained - target) / target)


def test_without_a_target_the_runs_own_method_is_matched(run):
    config = run()
    own, fft, lora = Matcher(config, read_spec(STORIES)).match(["adapt", "fft", "lora"])
    assert own.target == fft.target == lora.target == open_estimator(config, Cluster(gpus=1)).parameters.trained
    assert abs(lora.off) < 0.04 < abs(fft.off)  # a rank is a step of 6 %


def test_widths_grow_in_the_papers_ratio(run):
    """Llama-3.2-1B: 2048 to 2304, 8192 to 9216, 32 to 36 heads."""
    matcher = Matcher(run(), read_spec(LLAMA_1B))
    widened = matcher.family("preserve").of_size(256).expansion
    assert (widened.hidden_size, widened.intermediate_size, widened.num_attention_heads) == (256, 1024, 4)
    assert matcher.family("adapt").of_size(512).expansion.num_attention_heads == 8
    run_with_lora = run(method={"name": "lora", "rank": 8})
    assert Matcher(run_with_lora, read_spec(LLAMA_1B)).family("adapt").of_size(256).l_fp == 3


def test_by_default_a_stock_export_needs_no_zeros(run):
    spec = read_spec(STORIES)
    for norm in ("base", "separate"):
        matcher = Matcher(run(method__norm=norm), spec)
        widths = [matcher.family("preserve").of_size(size).expansion for size in range(8, 65, 8)]
        whole = [(64 + it.hidden_size, 8 + it.num_attention_heads) for it in widths]
        assert all(hidden % heads == 0 for hidden, heads in whole) == (norm == "base")


def test_other_settings_of_the_method_are_kept(run):
    spec = read_spec(STORIES)
    config = run(method__norm="base", method__collaborative_modules="both", method__l_fp=2)
    preserve, route = (match.settings for match in Matcher(config, spec).match(["preserve", "route"]))
    assert preserve.norm == route.norm == "base"
    assert (preserve.l_fp, route.l_fp, route.collaborative_modules) == (None, 2, "both")
    config = run(method={"name": "lora", "rank": 8, "alpha": 16, "target_modules": ["query", "down"]})
    (lora,) = (match.settings for match in Matcher(config, spec).match(["lora"], 20_000))
    assert lora.scale == 2 and lora.target_modules == ("query", "down")


def test_the_sections_can_be_trained_on_several_ranks(run):
    tp_size = 4
    config = run(parallel__tp_size=tp_size)
    matches = Matcher(config, read_spec(STORIES)).match(["lora", "llama_pro", "route"], 100_000)
    for match in matches:
        changed = run(method=match.settings.model_dump(mode="json"), parallel__tp_size=tp_size)
        assert changed.method == match.settings
        estimator = open_estimator(changed, Cluster(gpus=tp_size))
        estimator.estimate(estimator.own_choice)
        assert estimator.parameters.trained == match.trained
