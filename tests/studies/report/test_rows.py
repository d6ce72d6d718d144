"""Reading the runs of a report: summaries of studies, and folders of runs."""

from __future__ import annotations

import math

import pytest

from pipeline.errors import RunFolderError
from pipeline.studies.report.runs import group, read_runs
from tests.studies.report.studies import rows, write_study


def test_a_study_is_its_rows_with_their_metrics(tmp_path):
    content = rows()
    runs = read_runs([write_study(tmp_path / "korean", content)])
    assert [run.row.model_dump(exclude_none=True) for run in runs] == content
    assert {run.source for run in runs} == {"korean"}
    assert all(len(run.metrics) == 101 for run in runs)
    assert read_runs([tmp_path / "korean" / "summary.json"]) == runs


def test_unknown_keys_are_ignored(tmp_path):
    content = rows((1,))[:1]
    content[0] |= {"mood": "good", "peak_memory_gib": None}
    content[0]["after"]["korean"] |= {"verdict": "fine", "right": True, "mauve": 0.5, "perplexity": None}
    del content[0]["learning_rate"], content[0]["during"]
    (run,) = read_runs([write_study(tmp_path, content, diagnostics=False)])
    assert run.row.after["korean"].keys() == {"perplexity", "bits_per_byte", "mauve"}
    assert run.row.after["korean"]["perplexity"] == math.inf  # as orjson writes it
    assert run.metrics == [] and [validation.step for validation in run.row.validations] == [0, 1000]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda row: row.pop("roles"), r"row 0: roles: Field required"),
        (lambda row: row.update(steps="many"), r"row 0: steps"),
        (lambda row: row["before"].update(korean=7), r"row 0: before\.korean"),
        (lambda row: row.update(folder="../elsewhere"), "lies outside of the study"),
        (lambda row: row.update(folder="/etc"), "lies outside of the study"),
    ],
)
def test_a_summary_of_another_shape_is_refused(spoil, said, tmp_path):
    content = rows((1,))[:1]
    spoil(content[0])
    write_study(tmp_path, content, diagnostics=False)
    with pytest.raises(RunFolderError, match=said) as caught:
        read_runs([tmp_path])
    assert str(tmp_path / "summary.json") in str(caught.value) and "\n" not in str(caught.value)


def test_folders_without_a_run_are_refused(tmp_path):
    with pytest.raises(RunFolderError, match="found neither"):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(RunFolderError, match="no validation after the first"):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "perplexity/korean": 9.5, "perplexity/english": 3}\n')
    with pytest.raises(RunFolderError, match="no validation after the first"):  # nor does it say what is replayed
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")  # as good as a line that a kill cut short
    with pytest.raises(RunFolderError, match="no validation after the first"):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "perplexity/korean": 9.5}\n{"step": 2, "perplexity/korean": 9}\n[1]\n{"step": "x"}\n'
    )
    (tmp_path / "training.json").write_text('{"trainable_parameters": "many"}')
    with pytest.raises(RunFolderError, match=r"training\.json: trainable_parameters"):
        read_runs([tmp_path])


def test_folders_of_the_same_name_are_distinguished_and_repeated_folders_are_read_once(tmp_path):
    content = rows((1,))[:1]
    first, second = (write_study(tmp_path / parent / "korean", content, diagnostics=False) for parent in "ab")
    alone = write_study(tmp_path / "other", content, diagnostics=False)
    runs = read_runs([first, second, alone, first / "summary.json"])
    assert [run.source for run in runs] == ["a/korean", "b/korean", "other"]
    assert [len(own.runs) for own in group(runs)] == [1, 1, 1]  # no two seeds of one method


def test_runs_of_different_bases_share_no_report(tmp_path):
    ours = write_study(tmp_path / "ours", rows((1,))[:2], diagnostics=False)
    content = rows((1,))[:2]
    for row in content:
        row["before"]["korean"]["perplexity"] *= 1.01  # another dtype
    rounded = write_study(tmp_path / "rounded", content, diagnostics=False)
    assert len(read_runs([ours, rounded])) == 4
    for row in content:
        row["before"]["english"]["perplexity"] *= 1.5
    other = write_study(tmp_path / "other", content, diagnostics=False)
    assert len(read_runs([other])) == 2
    with pytest.raises(RunFolderError, match=r"ours and other: .* on english.*--beside") as caught:
        read_runs([ours, other])
    assert "\n" not in str(caught.value)
