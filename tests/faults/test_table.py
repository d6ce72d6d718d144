"""The table and summary.json of the fault suite."""

from __future__ import annotations

from tests.faults.table import Result, as_markdown, read_summary, write_summary


def test_a_summary_is_read_back_and_a_lost_run_is_in_the_table(tmp_path):
    results = [Result("kill -9", 3, 4, 12.345, True, "seed 1"), Result("flood", 1, None, None, False, "it failed")]
    write_summary(path := tmp_path / "new" / "summary.json", results)
    assert read_summary(path) == results
    assert as_markdown(results).splitlines()[2:] == [
        "| kill -9 | 3 | 4 | 12.3 | yes |",
        "| flood | 1 | all | never | NO |",
    ]
