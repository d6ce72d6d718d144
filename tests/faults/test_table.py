"""The table and summary.json of the fault suite."""

from __future__ import annotations

import json

from tests.faults.table import Result, as_markdown, as_text, read_summary, write_summary

RESULTS = [
    Result("kill -9", 3, 4, 12.345, True, "seed 1"),
    Result("flood", 1, None, None, False, "the job failed"),
]


def test_a_summary_is_read_back(tmp_path):
    path = tmp_path / "new" / "summary.json"
    write_summary(path, RESULTS)
    entry = {"fault": "kill -9", "times": 3, "steps_lost": 4, "seconds_to_resume": 12.3, "sequence_equal": True}
    assert json.loads(path.read_text())[0] == entry
    assert [result.entry for result in read_summary(path)] == [result.entry for result in RESULTS]


def test_a_lost_run_is_in_both_tables():
    assert "flood" in as_text(RESULTS).splitlines()[2]
    assert as_markdown(RESULTS).splitlines()[3] == "| flood | 1 | all | never | NO |"
