"""Which runs belong together, and how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.studies.report.runs import group, read_runs
from tests.studies.report.studies import METHODS, row, write_study


def styles(folder: Path, methods: Sequence[tuple[str, str | None]]) -> dict[str, int]:
    """The styles of a report of runs with these labels and methods."""
    content = [{**row(label, str(method), 1, 0.5, 0.1, 1), "method": method} for label, method in methods]
    return {own.label: own.style for own in group(read_runs([write_study(folder, content, diagnostics=False)]))}


def test_a_method_has_the_same_style_in_every_report(tmp_path):
    every = [(label, method) for label, method, *_ in METHODS]
    whole = styles(tmp_path / "whole", every)
    assert sorted(whole.values()) == list(range(len(METHODS)))
    some = styles(tmp_path / "some", [*reversed(every[::2])])
    assert len(some) == 4 and some.items() <= whole.items()


def test_groups_have_different_styles(tmp_path):
    alone = styles(tmp_path / "alone", [("adapt", "adapt")])["adapt"]
    several = styles(
        tmp_path / "several",
        [("(SVD, 0)", "adapt"), ("(0, 0)", "adapt"), ("whose", None), ("other", "prefix tuning"), ("fft", "fft")],
    )
    assert several["(SVD, 0)"] == alone and several["fft"] == 0
    assert len(set(several.values())) == 5
