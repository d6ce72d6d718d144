"""The launch path of the scripts: over an allocation with srun, or on one machine; stopped, killed, resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import stage_script

MEET = "run_stage meet on_every_rank python -m tests.slurm.meet"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")

# A stage of two ranks that, like training, saves and stops when it is told to, and goes on from there the next time.
TRAINING = """\
run_stage train on_every_rank bash -c '
    saved=$SAVE.$RANK
    [[ ! -e $saved ]] || { echo "rank $RANK went on"; exit 0; }
    trap "touch $saved; echo rank $RANK saved; exit 75" USR1 TERM
    echo "rank $RANK of $WORLD_SIZE works"
    sleep 200 & wait'
run_stage convert here echo converted
"""


def bash(script: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user without Slurm would."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        ["bash", str(script)], env={**clean, **env}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slurm
def test_ranks_meet_over_both_nodes(slurm_cluster: Cluster, tmp_path: Path):
    job = slurm_cluster.sbatch(stage_script(tmp_path, MEET, "--nodes=2", "--ntasks-per-node=2"), cwd=tmp_path)
    assert slurm_cluster.wait(job).state == "COMPLETED", slurm_cluster.output(job)
    lines = slurm_cluster.output(job).splitlines()
    expected = [f"rank {rank} of 4 on n{1 + rank // 2} by gloo: sum 10" for rank in range(4)]
    assert sorted(line for line in lines if line.startswith("rank")) == expected
    assert any(f"4 ranks over 2 nodes (n[1-2]), rendezvous at 127.0.0.1:{15000 + job}" in line for line in lines)


@pytest.mark.slurm
def test_the_rendezvous_can_be_overridden(slurm_cluster: Cluster, tmp_path: Path):
    override = {"MASTER_ADDR": "localhost", "MASTER_PORT": "14999"}
    job = slurm_cluster.sbatch(stage_script(tmp_path, MEET, *TWO_NODES), env=override, cwd=tmp_path)
    assert slurm_cluster.wait(job).state == "COMPLETED", slurm_cluster.output(job)
    assert "rendezvous at localhost:14999" in slurm_cluster.output(job)


@pytest.mark.slurm
def test_loopback_between_hosts_ends_the_job_with_one_line(slurm_cluster: Cluster, tmp_path: Path):
    job = slurm_cluster.sbatch(stage_script(tmp_path, MEET, *TWO_NODES), env={"HOST_COUNT": "2"}, cwd=tmp_path)
    end = slurm_cluster.wait(job)
    assert (end.state, end.exit_code) == ("FAILED", 1)
    assert "error: MASTER_ADDR 127.0.0.1 is 127.0.0.1 on " in slurm_cluster.output(job)
    assert "Traceback" not in slurm_cluster.output(job)


@pytest.mark.slurm
def test_one_process_beside_srun_is_refused(slurm_cluster: Cluster, tmp_path: Path):
    job = slurm_cluster.sbatch(
        stage_script(tmp_path, "run_stage meet here python -m tests.slurm.meet", *TWO_NODES), cwd=tmp_path
    )
    assert slurm_cluster.wait(job).state == "FAILED"
    assert "is one of 1 process(es), but 2 were allocated" in slurm_cluster.output(job)


@pytest.mark.slurm
def test_a_rank_that_dies_ends_the_job(slurm_cluster: Cluster, tmp_path: Path):
    body = "run_stage train on_every_rank bash -c 'if ((RANK == 1)); then kill -9 $$; fi; sleep 200'"
    job = slurm_cluster.sbatch(stage_script(tmp_path, body, *TWO_NODES), env={"EXIT_GRACE_S": "1"}, cwd=tmp_path)
    assert slurm_cluster.wait(job, timeout=60).state == "FAILED"
    assert "task 1: Killed" in slurm_cluster.output(job)
    assert "error: stage train ended with exit code" in slurm_cluster.output(job)


@pytest.mark.slurm
def test_ranks_that_end_one_after_the_other_all_have_their_last_words(slurm_cluster: Cluster, tmp_path: Path):
    body = "run_stage train on_every_rank bash -c 'sleep $((3 * RANK)); echo \"rank $RANK is done\"; exit 75'"
    job = slurm_cluster.sbatch(
        stage_script(tmp_path, body, *TWO_NODES), env={"MAX_RESTARTS": "0", "EXIT_GRACE_S": "30"}, cwd=tmp_path
    )
    slurm_cluster.wait(job)
    lines = slurm_cluster.output(job).splitlines()
    assert {"rank 0 is done", "rank 1 is done"} <= set(lines)
    assert any("stopped during train" in line for line in lines)


@pytest.mark.slurm
@pytest.mark.slow
def test_the_time_limit_leads_to_a_save_and_another_turn(slurm_cluster: Cluster, tmp_path: Path):
    options = (*TWO_NODES, "--time=1", "--signal=B:USR1@58", "--requeue", "--open-mode=append")
    job = slurm_cluster.sbatch(
        stage_script(tmp_path, TRAINING, *options), env={"SAVE": str(tmp_path / "saved")}, cwd=tmp_path
    )
    slurm_cluster.wait_for_output(job, "queueing job", timeout=90)
    assert "(restart 1)" in slurm_cluster.output(job)
    assert {"rank 0 saved", "rank 1 saved"} <= set(slurm_cluster.output(job).splitlines())
    assert "converted" not in slurm_cluster.output(job)
    slurm_cluster.start_now(job)
    end = slurm_cluster.wait(job)
    assert (end.state, end.restarts) == ("COMPLETED", 1)
    lines = slurm_cluster.output(job).splitlines()
    assert {"rank 0 went on", "rank 1 went on", "converted"} <= set(lines)


@pytest.mark.slurm
def test_ranks_that_save_by_themselves_get_another_turn_until_the_cap(slurm_cluster: Cluster, tmp_path: Path):
    """`scancel --signal` reaches the ranks and not the batch script, which learns it from their exit code."""
    job = slurm_cluster.sbatch(
        stage_script(tmp_path, TRAINING, *TWO_NODES, "--requeue", "--open-mode=append"),
        env={"SAVE": str(tmp_path / "saved"), "MAX_RESTARTS": "1"},
        cwd=tmp_path,
    )
    for restart in range(2):
        slurm_cluster.wait_for(job, lambda _: slurm_cluster.output(job).count("of 2 works") == 2 * (restart + 1))  # noqa: B023
        time.sleep(0.5)  # until their traps are set
        slurm_cluster.run("scancel", "--signal=TERM", str(job))
        if restart == 0:
            slurm_cluster.start_now(job)
            for saved in tmp_path.glob("saved.*"):
                saved.unlink()
    end = slurm_cluster.wait(job)
    assert (end.state, end.restarts) == ("FAILED", 1)
    assert "stopped during train after 1 restarts, and MAX_RESTARTS is 1" in slurm_cluster.output(job)


@pytest.mark.slurm
def test_a_cancelled_job_saves_and_does_not_come_back(slurm_cluster: Cluster, tmp_path: Path):
    job = slurm_cluster.sbatch(
        stage_script(tmp_path, TRAINING, *TWO_NODES), env={"SAVE": str(tmp_path / "saved")}, cwd=tmp_path
    )
    slurm_cluster.wait_for(job, lambda _: slurm_cluster.output(job).count("of 2 works") == 2)
    time.sleep(0.5)
    slurm_cluster.run("scancel", str(job))
    assert slurm_cluster.wait(job).state == "CANCELLED"
    assert sorted(path.name for path in tmp_path.glob("saved.*")) == ["saved.0", "saved.1"]


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
    result = bash(stage_script(tmp_path, f"run_stage train on_every_rank python {program}"), NPROC="2")
    assert result.returncode == code
    assert result.stderr.splitlines()[0] == "error: why"
    assert len(result.stderr.splitlines()) == (1 if code == 75 else 2)


def test_without_slurm_a_killed_rank_is_named(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(100)")
    result = bash(stage_script(tmp_path, f"run_stage train on_every_rank python {program}"), NPROC="2")
    assert result.returncode == 137
    assert "error: rank 1 was killed by signal 9" in result.stderr


def test_a_failing_stage_ends_the_script_with_its_exit_code(tmp_path: Path):
    result = bash(stage_script(tmp_path, "run_stage first here bash -c 'exit 7'\nrun_stage second here echo second"))
    assert result.returncode == 7
    assert "error: stage first ended with exit code 7" in result.stderr
    assert "second" not in result.stdout


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_script_stops_its_stage_and_starts_no_other(tmp_path: Path, how: signal.Signals):
    body = "run_stage first here sleep 1234.75\nrun_stage second here echo second"
    with subprocess.Popen(["bash", str(stage_script(tmp_path, body))], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "first" in process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(how)
        output = process.stdout.read()  # ends when the last holder of the pipe has gone, the stage included
    assert process.returncode == 75
    assert "the same command goes on from there" in output
    assert "second" not in output
