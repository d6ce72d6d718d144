"""SmolLM2-135M-Instruct, a real model, as `make smollm2` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.smollm2.base import DEFAULT_OUTPUT, make_base

FOLDER = Path(__file__).parents[3] / DEFAULT_OUTPUT


@pytest.fixture(scope="session")
def smollm2(request, tmp_path_factory) -> Path:
    """The model's folder. Tests that are marked `full` make it, where it is not there."""
    if FOLDER.exists():
        return FOLDER
    if request.config.getoption("-m") == "not full":
        pytest.skip(f"{FOLDER} is not there: make smollm2 makes it, and these tests then run")
    folder = tmp_path_factory.mktemp("bases") / FOLDER.name
    make_base(folder)
    return folder
