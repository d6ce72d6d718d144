"""Which packages a hosted base's recurrent layers lack is said before and when a run starts."""

from __future__ import annotations

import importlib.util

import pytest

from pipeline.checks.dry_run.make_plan import make_plan
from pipeline.config.run import load_config
from pipeline.extensions.hosted import kernels
from pipeline.sizing.cluster import Cluster
from tests.extensions.hosted.bases import opened, save_hosted
from tests.extensions.hosted.test_gate import ADAPT
from tests.programs import scale_cpt
from tests.training.runs import make_run

ABSENT = ("causal-conv1d", "flash-linear-attention")


@pytest.fixture
def installed(monkeypatch):
    """Chooses which of the packages seem to be installed."""
    find = importlib.util.find_spec

    def choose(*names):
        def found(name, *rest):
            if name in kernels._DISTRIBUTIONS:
                return name if name in names else None
            return find(name, *rest)

        kernels.missing_kernels.cache_clear()
        monkeypatch.setattr(importlib.util, "find_spec", found)

    yield choose
    kernels.missing_kernels.cache_clear()


@pytest.mark.parametrize(
    ("kind", "present", "missing"),
    [
        ("qwen3_next", (), ABSENT),
        ("qwen3_next", ("fla",), ("causal-conv1d",)),
        ("qwen3_next", ("fla", "causal_conv1d"), ()),
        ("mamba", (), ("causal-conv1d",)),
        ("llama", (), ()),
    ],
)
def test_what_the_modules_of_a_base_call_is_found(kind, present, missing, installed, tmp_path):
    installed(*present)
    spec = opened(save_hosted(kind, tmp_path)).spec
    assert kernels.missing_kernels(spec) == missing
    assert (kernels.describe_missing_kernels(spec) is None) == (missing == ())


def test_the_dry_run_says_so(tokens, installed, tmp_path):
    base = save_hosted("qwen3_next", tmp_path / "base")
    path = make_run(tmp_path / "run", tokens, zero=1, base=str(base), method=ADAPT)
    installed()
    row = dict(make_plan(load_config(path), Cluster(gpus=1, gpus_per_node=1)).rows)["kernels"]
    assert "causal-conv1d, flash-linear-attention not installed" in row
    assert "pip install 'scale-cpt[kernels]'" in row


@pytest.mark.full
def test_the_start_of_a_run_says_so_once(tokens, installed, tmp_path, capfd):
    base = save_hosted("qwen3_next", tmp_path / "base")
    path = make_run(
        tmp_path / "run", tokens, zero=1, base=str(base), method=ADAPT, schedule__steps=1
    )
    installed()
    done = scale_cpt("train", path, "--ranks", "1")
    said = done.stderr + capfd.readouterr().err
    assert done.returncode == 0, said
    assert said.count("not installed: transformers computes recurrent layers") == 1
