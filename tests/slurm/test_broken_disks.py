"""A run folder that cannot be written ends the script in one line, whatever is known of earlier attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import PASSING_FAULT, USER_ERROR
from tests.slurm.jobs import PROJECT, bash, run_config, stage_script


@pytest.mark.parametrize(("stage", "fault"), [("tokenize", "Read-only"), ("train", "Read-only"), ("tokenize", "Not a")])
def test_a_folder_that_cannot_be_written_ends_the_script_in_one_line(tmp_path: Path, small_disk, stage, fault):
    disk = small_disk(mib=1)
    (disk.path / "file").touch()
    disk.make_read_only()
    folder = disk.path / ("run" if fault == "Read-only" else "file/run")
    result = bash(PROJECT / "slurm" / "cpt_korean.sh", str(run_config(tmp_path, folder)), stage, NPROC="2")
    assert result.returncode == USER_ERROR, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: ") and "stage" not in line)
    assert str(disk.path) in line and fault in line
    assert "Traceback" not in result.stderr and "another attempt" not in result.stdout


def test_a_fault_that_may_pass_is_retried_a_few_times_where_nothing_can_be_recorded(tmp_path: Path, small_disk):
    disk = small_disk(mib=1)
    disk.make_read_only()
    body = f"run_stage train here bash -c 'exit {PASSING_FAULT}'"
    env = {"CONFIG": str(run_config(tmp_path, disk.path / "run")), "MAX_RESTARTS_WITHOUT_PROGRESS": "2"}
    result = bash(stage_script(tmp_path, body), **env)
    assert result.returncode == PASSING_FAULT
    assert result.stdout.count("another attempt") == 2
    assert "no further attempt at train: 3 attempt(s) in a row brought no newer checkpoint" in result.stdout
