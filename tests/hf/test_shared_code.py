"""The formulas that training and exported models both compute are one file each."""

from __future__ import annotations

import pytest

from tests.data.helpers import PROJECT


@pytest.mark.parametrize(
    ("link", "original"),
    [
        ("scale_math.py", "scale_math.py"),
        ("open_tokens.py", "open_tokens.py"),
        ("scale_own_calls.py", "extensions/hosted/own_calls.py"),
    ],
)
def test_exports_have_the_very_file_that_training_imports(link: str, original: str):
    folder = PROJECT / "pipeline"
    linked = folder / "hf" / "remote_code" / link
    assert linked.is_symlink(), "a copy would go its own way with the next change"
    assert linked.resolve() == (folder / original).resolve()
