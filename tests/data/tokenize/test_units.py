"""Samples of the beginnings of files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import sampled_documents
from pipeline.data.tokenize.units import beginning_of


def test_a_table_without_rows_is_the_beginning_of_nothing(tmp_path: Path):
    schema = pa.schema([("text", pa.string())])
    pq.ParquetWriter(tmp_path / "x.parquet", schema).close()
    unit, size = beginning_of(tmp_path / "x.parquet", Keys(), 1000)
    assert (unit.size, size) == (0, 0.0)


@pytest.mark.parametrize("rows", [100, 2500])
def test_a_sample_of_parquet_holds_what_was_asked_for(tmp_path: Path, rows: int):
    texts = [f"{number} " + "word " * 200 for number in range(5000)]
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "x.parquet", row_group_size=rows, compression="none"
    )
    wanted = 2**20
    documents_, factor = sampled_documents([str(tmp_path / "x.parquet")], Keys(), wanted)
    taken = sum(document.utf8_bytes for document in documents_)
    assert wanted * 0.9 < taken < wanted * 1.3
    assert factor == pytest.approx(sum(map(len, texts)) / taken, rel=0.1)
