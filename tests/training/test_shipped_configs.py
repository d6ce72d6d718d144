"""Every shipped configuration describes a run that can start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.deepspeed_config import accumulation_steps, load_deepspeed_config
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator

PROJECT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def project_root(monkeypatch):
    monkeypatch.chdir(PROJECT)


@pytest.mark.parametrize(
    ("name", "world_sizes"),
    [
        ("demo", (1, 2)),
        ("demo_fft", (1, 2)),
        ("demo_vocabulary", (1,)),
        ("cpt_korean_llama3.2_1b", (8, 16, 32, 64, 128)),
        ("cpt_korean_llama3.1_8b", (8, 16, 32, 64, 128)),
        ("cpt_korean_qwen3_30b_a3b", (8, 16, 32, 64, 128)),
        ("fineweb2_korean", (8,)),
    ],
)
def test_a_run_fits_its_intended_world_sizes(name, world_sizes):
    config = load_config(PROJECT / "configs" / f"{name}.yaml")
    for world_size in world_sizes:
        layout = Layout(world_size, config.parallel.tp_size)
        assert accumulation_steps(config.schedule, layout.dp_size) >= 1
        load_deepspeed_config(config.deepspeed, layout)


def test_the_8b_fits_on_eight_gpus_and_has_the_papers_proportions():
    config = load_config(PROJECT / "configs" / "cpt_korean_llama3.1_8b.yaml")
    estimator = open_estimator(config, Cluster(8), base_config=PROJECT / "configs" / "bases" / "llama-3.1-8b.json")
    assert estimator.estimate(estimator.own_choice).fits(Cluster(8))
    base, added = estimator.spec.widths, config.method.expansion
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        assert getattr(added, name) * 8 == getattr(base, name)
    assert config.method.l_fp * 16 == 3 * estimator.spec.num_layers
