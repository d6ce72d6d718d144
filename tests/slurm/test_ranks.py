"""Ranks find each other over an allocation or on one machine, and end together."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import Future
from pathlib import Path

import pytest

from pipeline.local_ranks import reserved_port
from tests.slurm.cluster import MESSAGE_TIMEOUT, Cluster
from tests.slurm.conftest import Scenario
from tests.slurm.jobs import TWO_NODES, bash, stage_script, submit

MEET = "run_stage meet on_every_rank python -m tests.slurm.meet"


def ranks_meet_over_both_nodes(cluster: Cluster, folder: Path) -> None:
    job = submit(cluster, folder, MEET, "--nodes=2", "--ntasks-per-node=2")
    assert cluster.wait(job).state == "COMPLETED", cluster.evidence(job)
    lines = cluster.output(job).splitlines()
    expected = [f"rank {rank} of 4 on n{1 + rank // 2} by gloo: sum 10" for rank in range(4)]
    assert sorted(line for line in lines if line.startswith("rank")) == expected
    assert any(f"4 ranks over 2 nodes (n[1-2]), rendezvous at 127.0.0.1:{15000 + job}" in line for line in lines)


def rendezvous_can_be_overridden(cluster: Cluster, folder: Path) -> None:
    with reserved_port() as port:
        job = submit(cluster, folder, MEET, *TWO_NODES, MASTER_ADDR="localhost", MASTER_PORT=str(port))
        assert cluster.wait(job).state == "COMPLETED", cluster.evidence(job)
    assert f"rendezvous at localhost:{port}\n" in cluster.output(job)


def ranks_that_end_one_by_one_are_waited_for(cluster: Cluster, folder: Path) -> None:
    body = "run_stage train on_every_rank bash -c 'sleep $((3 * RANK)); echo \"rank $RANK is done\"; exit 75'"
    job = submit(cluster, folder, body, *TWO_NODES, MAX_RESTARTS="0", EXIT_GRACE_S="300")
    cluster.wait(job)
    lines = cluster.output(job).splitlines()
    assert {"rank 0 is done", "rank 1 is done"} <= set(lines)
    assert any("stopped during train" in line for line in lines)


SCENARIOS: dict[str, Scenario] = {
    "ranks meet over both nodes": ranks_meet_over_both_nodes,
    "rendezvous can be overridden": rendezvous_can_be_overridden,
    "ranks that end one by one are waited for": ranks_that_end_one_by_one_are_waited_for,
}


@pytest.mark.slurm
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job(outcomes: dict[str, Future[None]], name: str):
    outcomes[name].result()


@pytest.mark.slurm
def test_a_rendezvous_that_slurm_does_not_answer_for_is_slurms_fault(slurm_cluster: Cluster, tmp_path: Path):
    """Exit code 71, as for faults of srun."""
    nowhere = tmp_path / "slurm.conf"
    described = slurm_cluster.conf.read_text().replace(MESSAGE_TIMEOUT, "MessageTimeout=2")
    nowhere.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", described))
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    env = {**slurm_cluster.environment, **allocation, "SLURM_CONF": str(nowhere), "SLURM_PATIENCE_S": "0"}
    script = stage_script(tmp_path, "on_every_rank true")
    result = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 71
    assert result.stderr.startswith("error: scontrol show node n[1-2] --oneliner: ")


def test_without_slurm_the_ranks_meet_on_this_machine(tmp_path: Path):
    result = bash(stage_script(tmp_path, MEET), NPROC="2", DS_ACCELERATOR="cpu")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any("no Slurm allocation: 2 processes on this machine" in line for line in lines)
    assert sorted(line for line in lines if line.startswith("rank")) == [
        "rank 0 of 2 on here by gloo: sum 3",
        "rank 1 of 2 on here by gloo: sum 3",
    ]


@pytest.mark.parametrize("code", [2, 75])
def test_without_slurm_the_script_ends_as_its_ranks_do(tmp_path: Path, code: int):
    """Two lines on stderr, the ranks' and the script's, where torchrun alone adds a traceback and ends with 1."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys\nif os.environ['RANK'] == '0': print('error: why', file=sys.stderr)\nsys.exit({code})",
        encoding="utf-8",
    )
    body = f"run_stage train on_every_rank python {program}"
    result = bash(stage_script(tmp_path, body), NPROC="2", EXIT_GRACE_S="300")
    assert result.returncode == code
    assert result.stderr.splitlines()[0] == "error: why"
    assert len(result.stderr.splitlines()) == (1 if code == 75 else 2)
