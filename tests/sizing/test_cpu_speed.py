"""The measured speed of a processor, beside what a whole step of a model reaches."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.methods.baselines import FullFineTuningMethod
from pipeline.model.from_hf import read_spec
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.cpu_speed import cpu_speed, measured_flops_per_second
from pipeline.sizing.flops import count_flops

BASES = Path(__file__).parents[2] / "configs" / "bases"


@pytest.mark.full
def test_a_part_of_the_base_reaches_what_a_whole_step_does():
    spec = read_spec(BASES / "llama-102m.json")
    spec = replace(spec, layers=spec.layers[:6])
    tokens = 512
    with torch.device("meta"):
        flops = count_flops(FullFineTuningMethod().build(spec, SINGLE, "none"), tokens).total
    with default_dtype(torch.float32):
        model = FullFineTuningMethod().build(spec, SINGLE, "none")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: list[float] = []
    for _ in range(3):
        begin = time.process_time()
        model(ids, ids, None, None, 0, 0).total.backward()
        seconds.append(time.process_time() - begin)
    torch.set_num_threads(before)
    whole = flops * tokens / min(seconds)
    # Loose: other processes on the machine share its caches.
    assert measured_flops_per_second(spec, torch.float32, 1) == pytest.approx(whole, rel=0.5)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["llama-1m", "neox-1m", "qwen3-moe-3m"])
def test_every_kind_of_base_has_a_speed(name):
    speed = cpu_speed(read_spec(BASES / f"{name}.json"), torch.float32, Cluster(1, on_cpu=True))
    assert 1e7 < speed.flops_per_second < 1e15
    assert "measured here" in str(speed) and speed.mfu == 1


def test_a_given_speed_is_not_measured():
    cluster = Cluster(2, on_cpu=True, peak_tflops=0.5)
    speed = cpu_speed(read_spec(BASES / "llama-1m.json"), torch.float32, cluster)
    assert speed.flops_per_second == 0.5e12
