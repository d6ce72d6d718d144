"""Names that strangers' files give lead nowhere but to their own folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.files import is_plain_name


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "../up", "a/b", "a/..", "a\\b", "a\0b"])
def test_a_name_that_leads_elsewhere_is_refused(name: str):
    assert not is_plain_name(name)


@given(st.text(alphabet="ab./\\ é", max_size=8))
def test_a_plain_name_stays_in_its_folder(name: str):
    if is_plain_name(name):
        path = Path(os.path.normpath(Path("/folder") / name))
        assert path.parent == Path("/folder") and path.name == name


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "..hidden", "a..b", "모델.bin", "with space"])
def test_ordinary_names_pass(name: str):
    assert is_plain_name(name)
