"""Every command prints its first line before it loads a large library."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import startup
from pipeline.commands import all_commands, subcommands
from tests.benchmarks.calls import rows_of


def test_every_command_is_started():
    started = {words[0] for words, *_ in startup.CASES.values()}
    assert started == {"--help", *all_commands()}
    of_config = {words[1] for words, *_ in startup.CASES.values() if words[0] == "config"}
    assert of_config == {"show", *subcommands("config")}


@pytest.mark.full
def test_no_command_waits_for_a_large_library_before_its_first_line(tmp_path):
    run = startup.make_run(tmp_path)
    loaded: dict[str, list[str]] = {}
    for name, case in startup.CASES.items():
        recorded = startup.record_imports(case, run)
        assert "argparse" in recorded.imported, "imports are seen"
        loaded[name] = startup.large_libraries(recorded)
    assert not {name: libraries for name, libraries in loaded.items() if libraries}


@pytest.mark.full
def test_times_until_the_first_line_and_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    names = ["status", "inspect", "gate"]
    rows = rows_of(startup, tmp_path, monkeypatch, "--rounds", 1, "--only", *names)
    status, inspect, gate = rows
    assert [row["command"] for row in rows] == names
    for row in rows:
        assert min(row["first_line_cpu_s"], row["first_line_s"]) > 0 and row["modules"] > 100
    assert status["first_line"].startswith("run ") and "loading" in gate["first_line"]
    # The libraries are loaded after the first line; gate was killed there.
    assert inspect["end_cpu_s"] > 2 * inspect["first_line_cpu_s"] and "end_s" not in gate
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)
