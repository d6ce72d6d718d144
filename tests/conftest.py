"""What several rooms' tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base
from tests.bases import STORIES, save_base


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Callable[[str], BaseFolder]:
    """A base model by its name in `bases.CONFIGS`, or "stories260K", written once a session."""
    folder: Path = tmp_path_factory.mktemp("bases")

    @cache
    def opened(name: str) -> BaseFolder:
        return open_base(STORIES if name == "stories260K" else save_base(name, folder / name.replace(" ", "_")))

    return opened


@pytest.fixture
def one_thread():
    """Small tensors only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
