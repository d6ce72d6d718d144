"""Progress of long work: a bar on a terminal, lines in a log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from pipeline import log
from pipeline.log import counted, progress_bar


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for interval in ("_BEFORE_THE_FIRST_S", "_BETWEEN_DRAWINGS_S", "_BETWEEN_LOG_LINES_S"):
        monkeypatch.setattr(log, interval, 0.0)


def test_a_log_has_a_plain_line_each_time(caplog):
    with caplog.at_level(logging.INFO, "pipeline"), progress_bar("tokenizing", 4_000_000, "B") as bar:
        bar.update(1_000_000)
        bar.update(2_000_000)
    said = [record.getMessage() for record in caplog.records]
    parts = ["0.00 of 4.00MB (0 %)", "1.00M of 4.00MB (25 %)", "3.00M of 4.00MB (75 %)"]
    assert [line.split(",")[0] for line in said] == [f"tokenizing: {part}" for part in parts]
    assert all(line.endswith(" left") and "\r" not in line for line in said)


def test_a_bar_on_a_terminal_disappears(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(counted("abc", "upscaling", 3, " blocks")) == ["a", "b", "c"]
    drawn = terminal.getvalue()
    assert "upscaling: 100%" in drawn and drawn.rsplit("\r", 2)[1].strip() == ""
