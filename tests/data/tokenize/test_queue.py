"""What a job may continue, and what it says where it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import DataError
from tests.data.helpers import documents, tokenize, write_jsonl


@pytest.mark.parametrize(
    ("name", "heldout_fraction", "folders"),
    [
        ("corpus", 0.0, "this folder"),
        ("corpus", 0.3, "this folder and corpus.heldout"),
        ("corpus.heldout", 0.0, "this folder"),
    ],
)
def test_a_refusal_names_the_folders_to_remove(
    tmp_path: Path, name: str, heldout_fraction: float, folders: str
):
    source = write_jsonl(tmp_path / "x.jsonl", documents(30))
    output = tmp_path / name
    tokenize(output, source, heldout_fraction=heldout_fraction)
    with pytest.raises(DataError) as refused:
        tokenize(output, source, heldout_fraction=heldout_fraction, text_key="body")
    assert f"remove {folders} to make the corpus again" in str(refused.value)
