"""A stage that is told to stop saves, and the script ends or requeues its job."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Scenario
from tests.slurm.jobs import REQUEUED, bash, run_config, stage_script, submit

# A stage of two ranks that saves and stops at a signal, as training does, and continues at the next attempt.
TRAINING = """\
run_stage train on_every_rank bash -c '
    saved=$SAVE.$RANK
    [[ ! -e $saved ]] || { echo "rank $RANK went on"; exit 0; }
    trap "sleep 0.5; touch $saved; echo rank $RANK saved; exit 75" USR1 TERM
    echo "rank $RANK of $WORLD_SIZE works"
    sleep 200 & wait'
run_stage convert here echo converted
"""


def submit_training(cluster: Cluster, folder: Path, *options: str, body: str = TRAINING) -> int:
    """Submits it, and waits until both ranks have installed their traps."""
    job = submit(cluster, folder, body, *REQUEUED, *options, SAVE=str(folder / "saved"))
    cluster.wait_for_output(job, "of 2 works", count=2)
    return job


def time_limit_saves_and_requeues(cluster: Cluster, folder: Path) -> None:
    job = submit_training(cluster, folder, "--time=30", "--signal=B:USR1@900")
    # Less than the 900 s of --signal: Slurm sends the signal at its next check, within half a minute.
    cluster.scontrol("update", f"JobId={job}", "TimeLimit=14")
    cluster.wait_for_output(job, "queueing job")
    assert "restart 1, " in cluster.output(job) and "converted" not in cluster.output(job)
    cluster.scontrol("update", f"JobId={job}", "TimeLimit=30")
    continues(cluster, job)
    assert "converted" in cluster.output(job).splitlines()


def terminated_script_saves_and_requeues(cluster: Cluster, folder: Path) -> None:
    """srun would answer the script's TERM by killing every rank at once."""
    job = submit_training(cluster, folder)
    cluster.run("scancel", "--batch", "--signal=TERM", str(job))
    continues(cluster, job)


def continues(cluster: Cluster, job: int) -> None:
    """Both ranks save, and the job's second start continues."""
    cluster.start_now(job)
    end = cluster.wait(job)
    assert (end.state, end.restarts) == ("COMPLETED", 1), cluster.evidence(job)
    lines = set(cluster.output(job).splitlines())
    assert {"rank 0 saved", "rank 1 saved", "rank 0 went on", "rank 1 went on"} <= lines


def interrupted_script_saves_and_ends(cluster: Cluster, folder: Path) -> None:
    job = submit_training(cluster, folder)
    cluster.run("scancel", "--batch", "--signal=INT", str(job))
    assert cluster.wait(job) == ("FAILED", 75, 0), cluster.evidence(job)
    assert {"rank 0 saved", "rank 1 saved"} <= set(cluster.output(job).splitlines())


def second_interrupt_ends_hanging_ranks(cluster: Cluster, folder: Path) -> None:
    hangs = 'trap "echo rank $RANK hangs" USR1; echo "rank $RANK of 2 works"; while true; do sleep 0.2; done'
    job = submit_training(cluster, folder, body=f"run_stage train on_every_rank bash -c '{hangs}'")
    cluster.run("scancel", "--batch", "--signal=INT", str(job))
    cluster.wait_for_output(job, " hangs", count=2)
    cluster.run("scancel", "--batch", "--signal=INT", str(job))
    assert cluster.wait(job) == ("FAILED", 130, 0), cluster.evidence(job)


def cancelled_job_stays_cancelled(cluster: Cluster, folder: Path) -> None:
    """Although its stage fails at the signal, with a code that is retried."""
    body = """run_stage train here bash -c 'trap "exit 70" TERM; echo works; sleep 100 & wait'"""
    job = submit(cluster, folder, body, "--requeue")
    cluster.wait_for_output(job, "works\n")
    cluster.run("scancel", str(job))
    end = cluster.wait(job)
    assert (end.state, end.restarts) == ("CANCELLED", 0), cluster.evidence(job)
    assert "queueing job" not in cluster.output(job)


SCENARIOS: dict[str, Scenario] = {
    "time limit saves and requeues": time_limit_saves_and_requeues,
    "terminated script saves and requeues": terminated_script_saves_and_requeues,
    "interrupted script saves and ends": interrupted_script_saves_and_ends,
    "second interrupt ends hanging ranks": second_interrupt_ends_hanging_ranks,
    "cancelled job stays cancelled": cancelled_job_stays_cancelled,
}


@pytest.mark.slurm
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job(outcomes: dict[str, Future[None]], name: str):
    outcomes[name].result()


def test_a_failing_stage_ends_the_script_with_its_exit_code(tmp_path: Path):
    result = bash(stage_script(tmp_path, "run_stage first here bash -c 'exit 7'\nrun_stage second here echo second"))
    assert result.returncode == 7
    assert "error: stage first ended with exit code 7" in result.stderr
    assert "second" not in result.stdout


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stopped_script_stops_its_stage_and_starts_no_other(tmp_path: Path, how: signal.Signals, code: int):
    body = "run_stage first here bash -c 'echo works; exec sleep 1234.75'\nrun_stage second here echo second"
    with subprocess.Popen(["bash", str(stage_script(tmp_path, body))], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "first" in process.stdout.readline()
        assert process.stdout.readline() == "works\n"
        process.send_signal(how)
        output = process.stdout.read()  # ends when the last holder of the pipe has gone, the stage included
    assert process.returncode == code
    assert "the same command resumes from there" in output
    assert "second" not in output


@pytest.mark.parametrize("how", ["USR1", "TERM", "INT"])
def test_a_stop_between_two_stages_starts_no_other(tmp_path: Path, how: str):
    result = bash(
        stage_script(tmp_path, f"run_stage first here true\nkill -{how} $$\nrun_stage second here echo second")
    )
    assert result.returncode == 75
    assert "stopped before second" in result.stdout
    assert "second" not in result.stdout.splitlines()


def test_a_stage_that_fails_after_a_stop_is_not_tried_again(tmp_path: Path):
    body = """run_stage train here bash -c 'trap "exit 70" TERM; echo works; sleep 100 & wait'"""
    script = stage_script(tmp_path, body)
    env = {**os.environ, "CONFIG": str(run_config(tmp_path))}
    with subprocess.Popen(["bash", str(script)], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "train" in process.stdout.readline()
        assert process.stdout.readline() == "works\n"
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
    assert process.returncode == 70
    assert "works" not in output and "another attempt" not in output
