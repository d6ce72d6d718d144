"""The formulas that training and exported models both compute are one file each."""

from __future__ import annotations

import pytest

from tests.data.helpers import PROJECT


@pytest.mark.parametrize("name", ["scale_math.py", "open_tokens.py"])
def test_exports_have_the_very_file_that_training_imports(name: str):
    folder = PROJECT / "pipeline"
    linked = folder / "hf" / "remote_code" / name
    assert linked.is_symlink(), "a copy would go its own way with the next change"
    assert linked.resolve() == (folder / name).resolve()
