"""An exported expansion trains on as the function that it was trained to be, or not at all."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checks.checklist import check_stage, input_checks
from pipeline.checks.input_checks import check_trained_expansion
from pipeline.checks.inputs import RunInputs
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.convert import convert, latest_conversion
from pipeline.conversion.probe_texts import probe_maker
from pipeline.errors import CheckpointError
from tests.distributed import run_ranks
from tests.training.runs import make_run, train, write_config

WIDE = {"zero": 1, "method__norm": "base", "schedule__steps": 1}


@pytest.fixture(scope="module")
def first(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of one step, whose expansion is exported to `expansion`."""
    run = tmp_path_factory.mktemp("first")
    path = make_run(run, tokens, **WIDE)
    assert run_ranks(train, 1, path) == [0]
    config = load_config(path)
    exported = replace(latest_conversion(config), format="expansion", output=run / "expansion")
    assert convert(exported, probe_maker({}))
    return config


# Each setting that changes what trained weights compute, and leaves their shapes.
OTHER_FUNCTIONS = {
    "norm": ({"method__norm": "separate"}, "method.norm (expected 'base', found 'separate')"),
    "router": (
        {"method__router_threshold": 0.25},
        "method.router_threshold (expected 0.5, found 0.25)",
    ),
    "precision": ({"base_precision": "nf4"}, "base_precision (expected 'bf16', found 'nf4')"),
    "l_fp": ({"method__l_fp": 2}, "method.l_fp (expected 3, found 2)"),
}


@pytest.mark.parametrize("what", OTHER_FUNCTIONS)
def test_an_expansion_does_not_train_on_as_another_function(first, tokens, tmp_path, what):
    changes, message = OTHER_FUNCTIONS[what]
    expansion = {"init_expansion": str(first.folder / "expansion")}
    path = write_config(tmp_path, tokens, **{**expansion, **WIDE, **changes})
    # Before tokenization, in the dry run, and where training begins.
    for stage in ("tokenize", "train", "dry run"):
        assert check_trained_expansion in input_checks(stage)
    with pytest.raises(CheckpointError, match=re.escape(f"trained with another {message}")):
        check_stage(load_config(path), 1, "train")
    # An initial expansion has learned nothing: the same settings may change there.
    initial = {"init_expansion": str(first.folder / "initial_expansion")}
    path = write_config(tmp_path, tokens, **{**initial, **WIDE, **changes})
    check_trained_expansion(RunInputs(load_config(path), 1))


def test_an_expansion_of_an_earlier_version_trains_on(first, tokens, tmp_path, caplog):
    copied = shutil.copytree(first.folder / "expansion", tmp_path / "expansion")
    manifest = json.loads((copied / "manifest.json").read_text())
    assert manifest.pop("trained_as")["method"]["norm"] == "base"
    del manifest["checksum"]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    path = write_config(tmp_path, tokens, init_expansion=str(copied), **WIDE)
    with caplog.at_level("INFO"):
        check_stage(load_config(path), 1, "train")
    assert "without a record of method.norm" in caplog.text
