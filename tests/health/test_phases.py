"""A rank's phase, and the time of each phase."""

from __future__ import annotations

import time

import pytest
import torch

from pipeline.health.liveness import Phases


@pytest.fixture
def phases():
    return Phases(torch.device("cpu"))


def test_an_inner_phase_interrupts_the_outer_one_and_no_second_counts_twice(phases):
    before = time.perf_counter()
    phases.seconds()
    begin = time.perf_counter()
    with phases("step"):
        time.sleep(0.02)
        with phases("communication"):
            time.sleep(0.03)
        assert phases.state.phase == "step"
        time.sleep(0.02)
    end = time.perf_counter()
    spent = phases.seconds()
    after = time.perf_counter()
    assert spent["step"] >= 0.04
    assert spent["communication"] >= 0.03
    assert end - begin <= sum(spent.values()) <= after - before
    assert "step" not in phases.seconds(), "each call starts from zero"


def test_an_exception_leaves_its_phase(phases):
    with pytest.raises(ValueError, match="here"), phases("backward"):
        raise ValueError("here")
    assert phases.state.phase == "backward"
