"""The small study, changed and opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from studies.harness.runs import StudyRuns
from studies.harness.study import load_study
from tests.studies.studies import study_values, write_study


@pytest.fixture
def opened(tmp_path: Path, tokens: Path) -> Callable[..., StudyRuns]:
    """The runs of the small study after `change` to its values; `data` is its texts' folder."""

    def open_changed(
        change: Callable[[dict[str, Any]], object] = lambda _: None, data: Path = tmp_path
    ) -> StudyRuns:
        values = study_values(tmp_path, tokens)
        change(values)
        path = write_study(tmp_path, values)
        return StudyRuns(load_study(path, data), str(path))

    return open_changed
