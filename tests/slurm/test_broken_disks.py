"""A run folder that cannot be written ends the script in one line, whatever is known of earlier attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.errors import PASSING_FAULT, USER_ERROR
from tests.disks import SmallDisk
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PROJECT, bash, stage_script

SCRIPT = PROJECT / "slurm" / "cpt_korean.sh"


def config_in(place: Path, folder: Path) -> Path:
    """The demo's configuration with its run in `folder`, written to `place`."""
    values = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    path = place / "config.yaml"
    path.write_text(yaml.safe_dump({**values, "folder": str(folder)}), encoding="utf-8")
    return path


def faults(stderr: str) -> list[str]:
    """The lines of the program's own faults."""
    return [line for line in stderr.splitlines() if line.startswith("error: ") and "error: stage" not in line]


@pytest.mark.parametrize("stage", ["tokenize", "train"])
def test_a_read_only_run_folder_ends_the_script_in_one_line(tmp_path: Path, small_disk, stage: str):
    disk: SmallDisk = small_disk(mib=1)
    disk.make_read_only()
    config = config_in(tmp_path, disk.path / "run")
    result = bash(SCRIPT, str(config), stage, DS_ACCELERATOR="cpu", NPROC="2")
    assert result.returncode == USER_ERROR, result.stderr
    assert len(faults(result.stderr)) == 1, result.stderr
    assert str(disk.path / "run") in faults(result.stderr)[0] and "Read-only file system" in faults(result.stderr)[0]
    assert "Traceback" not in result.stderr and "another attempt" not in result.stdout


def test_a_run_folder_below_a_file_ends_the_script_in_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    result = bash(SCRIPT, str(config_in(tmp_path, tmp_path / "file" / "run")), "tokenize")
    assert result.returncode == USER_ERROR, result.stderr
    assert len(faults(result.stderr)) == 1 and "Not a directory" in result.stderr
    assert "Traceback" not in result.stderr and "another attempt" not in result.stdout


def test_a_fault_that_may_pass_is_retried_a_few_times_where_nothing_can_be_recorded(tmp_path: Path, small_disk):
    disk: SmallDisk = small_disk(mib=1)
    disk.make_read_only()
    body = f"run_stage train here bash -c 'exit {PASSING_FAULT}'"
    env = {"CONFIG": str(config_in(tmp_path, disk.path / "run")), "MAX_RESTARTS_WITHOUT_PROGRESS": "2"}
    result = bash(stage_script(tmp_path, body), **env)
    assert result.returncode == PASSING_FAULT
    assert result.stdout.count("another attempt") == 2
    assert "no further attempt at train: 3 attempt(s) in a row brought no newer checkpoint" in result.stdout


@pytest.mark.slurm
def test_a_job_on_a_read_only_disk_fails_and_stays_failed(slurm_cluster: Cluster, tmp_path: Path, small_disk):
    disk: SmallDisk = small_disk(mib=1)
    disk.make_read_only()
    config = config_in(tmp_path, disk.path / "run")
    env = {"STAGES": "tokenize", "CONFIG": str(config)}
    job = slurm_cluster.sbatch(SCRIPT, env=env, args=("--nodes=1", f"--output={tmp_path}/%j.out"), cwd=PROJECT)
    end = slurm_cluster.wait(job)
    assert (end.state, end.exit_code, end.restarts) == ("FAILED", USER_ERROR, 0), slurm_cluster.evidence(job)
    assert len(faults(slurm_cluster.output(job))) == 1
