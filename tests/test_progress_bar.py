"""Progress of long work: a bar on a terminal, lines in a log."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from pathlib import Path

import pytest

from pipeline import log
from pipeline.log import counted, progress_bar
from tests.terminal import terminal

PROJECT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for interval in ("_BEFORE_THE_FIRST_S", "_BETWEEN_DRAWINGS_S", "_BETWEEN_LOG_LINES_S"):
        monkeypatch.setattr(log, interval, 0.0)


def test_a_log_has_a_plain_line_each_time(caplog):
    with (
        caplog.at_level(logging.INFO, "pipeline"),
        progress_bar("tokenizing", 4_000_000, "B") as bar,
    ):
        bar.update(1_000_000)
        bar.update(2_000_000)
    said = [record.getMessage() for record in caplog.records]
    parts = ["0 of 4.00MB (0 %)", "1.00M of 4.00MB (25 %)", "3.00M of 4.00MB (75 %)"]
    assert [line.split(",")[0] for line in said] == [f"tokenizing: {part}" for part in parts]
    assert all(line.endswith(" left") and "\r" not in line for line in said)


@pytest.mark.parametrize(
    ("unit", "total", "done", "shown"),
    [
        (" windows", 300, 19, "19 of 300 windows"),
        (" steps", 12_000, 1_234, "1,234 of 12,000 steps"),
        ("B", 1, 1, "1 of 1B"),
        (" tokens", 999, 70, "70 of 999 tokens"),
        (" tokens", 4_000_000, 1_500, "1.50k of 4.00M tokens"),
    ],
)
def test_counts_are_whole_numbers(caplog, unit, total, done, shown):
    with caplog.at_level(logging.INFO, "pipeline"), progress_bar("work", total, unit) as bar:
        bar.update(done)
    assert caplog.records[-1].getMessage().startswith(f"work: {shown} (")


def test_the_first_line_in_a_log_comes_sooner_than_the_next(caplog, monkeypatch):
    monkeypatch.setattr(log, "_BETWEEN_LOG_LINES_S", 30.0)
    monkeypatch.setattr(log, "_BEFORE_THE_FIRST_LOG_LINE_S", 5.0)
    with caplog.at_level(logging.INFO, "pipeline"):
        bar = progress_bar("reading", 100, " tokens")
        now = bar.start_t
        # `_time` is tqdm's clock.
        for seconds, lines in ((4, 0), (6, 1), (30, 1), (37, 2)):
            monkeypatch.setattr(bar, "_time", lambda seconds=seconds: now + seconds)
            bar.update(1)
            assert len(caplog.records) == lines, seconds


def test_a_bar_on_a_terminal_disappears(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(counted("abc", "upscaling", 3, " blocks")) == ["a", "b", "c"]
    drawn = terminal.getvalue()
    assert "upscaling: 100%" in drawn and drawn.rsplit("\r", 2)[1].strip() == ""


# Two processes of one terminal: a bar is drawn, then this process and another one write a line.
PROGRAM = """
import logging, subprocess, sys, time
from pipeline import log
from pipeline.command_line import run

def main():
    log._BEFORE_THE_FIRST_S = log._BETWEEN_DRAWINGS_S = 0.0
    figures = ["loss 14.7394", "learning rate 1.11e-05", "179 tokens/s per rank", "MFU 41.0%"]
    with log.progress_bar("training", 3000, " steps", scaled=False) as bar:
        time.sleep(0.01)
        for step in (1, 2):
            bar.move_to(step, figures, show=True)
        log.get_logger("here").info("a line of this process")
        bar.move_to(3, figures, show=True)
        other = (
            "from pipeline import log; log.configure(); "
            'log.get_logger("x").warning("a line of another")'
        )
        subprocess.run([sys.executable, "-c", other], check=True)
        bar.move_to(4, figures, show=True)
        script = "source slurm/common.sh; say a line of the script | cat"
        subprocess.run(["bash", "-c", script], check=True)
        bar.move_to(5, figures, show=True)
        raise KeyboardInterrupt

run(main)
"""


@pytest.mark.parametrize(("columns", "figures"), [(70, 0), (86, 1), (110, 2), (128, 3), (200, 4)])
def test_a_bar_has_room_its_figures_are_whole_and_lines_have_their_own(columns, figures):
    with terminal([sys.executable, "-c", PROGRAM], os.environ, PROJECT, columns) as opened:
        assert opened.end() == 130
    drawn = [
        piece
        for piece in re.split("[\r\n]", opened.written)
        if "/3,000" in piece and " 0/3,000" not in piece
    ]
    assert len(drawn) >= 5
    all_figures = ["loss 14.7394", "learning rate 1.11e-05", "179 tokens/s per rank", "MFU 41.0%"]
    for text in drawn:
        assert len(text.replace("\x1b[K", "")) < columns
        bar = text.split("|")[1]
        assert len(bar) >= 10, text
        assert [figure for figure in all_figures if figure in text] == all_figures[:figures], text
        assert text.rstrip().endswith("]"), text
    lines = [line for line in opened.screen if line]
    assert [line[9:] for line in lines[:2]] == [
        "[main] I a line of this process",
        "[main] W a line of another",
    ]
    assert lines[2].endswith("] a line of the script") and lines[2].startswith("[")
    assert lines[3:] == ["interrupted"]
