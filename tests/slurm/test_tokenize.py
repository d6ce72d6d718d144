"""Tokenizing as a job array on two nodes: killed, submitted again, the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.helpers import contents, run_tool
from tests.slurm.cluster import FINAL_STATES, Cluster
from tests.slurm.jobs import PROJECT
from tests.texts import REVIEWS, STORIES
from tests.training.runs import write_config
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.full]

SMALL_UNITS = ("--unit-mib", "0.25")


def configuration(run: Path) -> Path:
    """A run that reads the demo's corpora into `run/tokens`."""
    corpora = {
        "korean": {"input": [str(REVIEWS)], "heldout_fraction": 0.1},
        "english": {"input": [str(STORIES)], "role": "replay"},
    }
    return write_config(run, run / "tokens", data__corpora=corpora)


def submit(cluster: Cluster, config: Path, array: str) -> int:
    options = (f"--array={array}", f"--output={config.parent}/job-%A_%a.out")
    return cluster.sbatch(*options, "slurm/tokenize_korean.sh", config, *SMALL_UNITS, cwd=PROJECT)


def ends_of(cluster: Cluster, job: int) -> set[str]:
    """Waits until all tasks of the array have ended; returns their states."""

    def states() -> set[str]:
        listed = ("--noheader", "--array", f"--jobs={job}", "--states=all", "--format=%T")
        return set(cluster.run("squeue", *listed).split())

    assert wait_until(lambda: states() <= FINAL_STATES), cluster.run("squeue", "--long")
    return states()


def test_an_array_over_two_nodes(slurm_cluster: Cluster, tmp_path: Path):
    """Four tasks, killed at work; then three, which find some of it done."""
    config = configuration(tmp_path / "run")
    done = run_tool(configuration(tmp_path / "undisturbed"), "--workers", "1", *SMALL_UNITS)
    assert done.returncode == 0, done.stderr

    killed = submit(slurm_cluster, config, "0-3")
    assert wait_until(lambda: len(list(tmp_path.glob("run/tokens/*/.units/*-*[0-9].json"))) >= 3, every_s=0.02)
    slurm_cluster.run("scancel", "--signal=KILL", "--full", str(killed))
    assert ends_of(slurm_cluster, killed) != {"COMPLETED"}

    again = submit(slurm_cluster, config, "10-30:10")
    assert ends_of(slurm_cluster, again) == {"COMPLETED"}
    assert contents(tmp_path / "run" / "tokens") == contents(tmp_path / "undisturbed" / "tokens")
