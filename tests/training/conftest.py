"""Tokens for the training tests, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import make_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))
