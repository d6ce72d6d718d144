"""SmolLM2-135M-Instruct, a real model, as `make smollm2` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.run import load_config
from studies.smollm2.base import DEFAULT_OUTPUT, make_base
from tests.studies.smollm2.runs import LORA, scale_cpt, settings_of, trained
from tests.training.runs import tokenize_corpora, write_config

FOLDER = Path(__file__).parents[3] / DEFAULT_OUTPUT


@pytest.fixture(scope="session")
def smollm2(request, tmp_path_factory) -> Path:
    """The model's folder. Tests that are marked `full` make it, where it is not there."""
    if FOLDER.exists():
        return FOLDER
    if "not full" in (request.config.getoption("-m") or ""):
        pytest.skip(f"{FOLDER} is not there: make smollm2 makes it, and these tests then run")
    folder = tmp_path_factory.mktemp("bases") / FOLDER.name
    make_base(folder)
    return folder


@pytest.fixture(scope="session")
def tokens(smollm2, tmp_path_factory) -> Path:
    """The held-out reviews and books in the model's own tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    tokenize_corpora(
        load_config(write_config(folder / "run", folder, **settings_of(smollm2, LORA)))
    )
    return folder


@pytest.fixture(scope="session")
def gated_export(smollm2, tokens, tmp_path_factory) -> Path:
    """LoRA with open rows and gains after four steps, behind a gate, in the format `scale`."""
    run = trained(tmp_path_factory.mktemp("gated"), tokens, settings_of(smollm2, LORA))
    scale_cpt("gate", run)
    scale_cpt("convert", run)
    return run.parent / "hf"
