"""Tokenizing as a job array and over MPI ranks: killed, submitted again, the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.helpers import contents, run_tool
from tests.slurm.cluster import FINAL_STATES, NODES, Cluster
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


def submit(cluster: Cluster, config: Path, *options: str, **env: str) -> int:
    arguments = (*options, f"--output={config.parent}/job-%A_%a.out")
    return cluster.sbatch(
        *arguments, "slurm/tokenize_korean.sh", config, *SMALL_UNITS, cwd=PROJECT, **env
    )


def outputs(config: Path) -> str:
    return "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(config.parent.glob("job-*.out"))
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the corpora that one process makes, with the hash of each."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_tool(configuration(folder), "--workers", "1", *SMALL_UNITS)
    assert done.returncode == 0, done.stderr
    return contents(folder / "tokens")


def wait_for_units(run: Path) -> None:
    """Waits until some units of work are done, and others not."""
    assert wait_until(
        lambda: len(list(run.glob("tokens/*/.units/*-*[0-9].json"))) >= 3, every_s=0.02
    )


def ends_of(cluster: Cluster, job: int) -> set[str]:
    """Waits until all tasks of the array have ended; returns their states."""

    def states() -> set[str]:
        listed = ("--noheader", "--array", f"--jobs={job}", "--states=all", "--format=%T")
        return set(cluster.run("squeue", *listed).split())

    assert wait_until(lambda: states() <= FINAL_STATES), cluster.run("squeue", "--long")
    return states()


def test_an_array_over_two_nodes(
    slurm_cluster: Cluster, tmp_path: Path, undisturbed: dict[str, str]
):
    """Four tasks, killed at work; then three, which find some of it done."""
    config = configuration(tmp_path / "run")
    killed = submit(slurm_cluster, config, "--array=0-3")
    wait_for_units(tmp_path / "run")
    slurm_cluster.run("scancel", "--signal=KILL", "--full", str(killed))
    assert ends_of(slurm_cluster, killed) != {"COMPLETED"}

    again = submit(slurm_cluster, config, "--array=10-30:10")
    assert ends_of(slurm_cluster, again) == {"COMPLETED"}, outputs(config)
    assert contents(tmp_path / "run" / "tokens") == undisturbed


def test_mpi_ranks_over_two_nodes(
    slurm_cluster: Cluster, tmp_path: Path, undisturbed: dict[str, str]
):
    """Four ranks, two a node, which MPI tells apart."""
    config = configuration(tmp_path / "run")
    # Both nodes are this machine, which Open MPI's shared memory does not expect.
    launcher = (
        "mpirun --allow-run-as-root --mca btl self,tcp --mca btl_tcp_if_include lo --display-map"
    )
    shape = ("--array=0", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    job = submit(slurm_cluster, config, *shape, MPI="1", MPI_LAUNCHER=launcher)
    assert ends_of(slurm_cluster, job) == {"COMPLETED"}, outputs(config)
    mapped = outputs(config)
    for node in NODES:
        assert f"Data for node: {node}\tNum slots: 2\tMax slots: 0\tNum procs: 2" in mapped
    assert contents(tmp_path / "run" / "tokens") == undisturbed
