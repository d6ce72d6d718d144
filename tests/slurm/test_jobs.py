"""What becomes of jobs that are stopped, killed or cancelled, on a real Slurm.

They mostly wait, so they run at the same time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import Cluster, ClusterError
from tests.slurm.jobs import run_config, stage_script, submit
from tests.terminal import terminal
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

BETWEEN_STARTS_S = 0.5
"""Jobs that start in the same instant make Slurm 22.05's slurmctld crash now and then."""
ATTEMPTS = 3
REQUEUED = ("--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append")

# A stage of two ranks that saves and stops at a signal, as training does, rank 1 later than rank 0.
# The next attempt goes on.
TRAINING = """\
run_stage train on_every_rank bash -c '
    [[ ${SLURM_RESTART_COUNT:-0} == 0 ]] || { echo "rank $RANK went on"; exit 0; }
    trap "sleep $((1 + 3 * RANK)); echo rank $RANK saved; exit 75" USR1 TERM
    echo "rank $RANK works as $$"
    sleep 200 & wait'
run_stage convert here echo converted
"""
SAVED = {"rank 0 saved", "rank 1 saved"}


def training(
    cluster: Cluster, folder: Path, *options: str, body: str = TRAINING, **env: str
) -> int:
    """Submits it, and waits until both ranks have installed their traps."""
    job = submit(cluster, folder, body, *REQUEUED, *options, **env)
    cluster.wait_for_output(job, " works", count=2)
    return job


def lines_of(cluster: Cluster, job: int) -> set[str]:
    return set(cluster.output(job).splitlines())


def goes_on(cluster: Cluster, job: int) -> None:
    """The job is queued again, and its second start completes it."""
    cluster.start_now(job)
    end = cluster.wait(job)
    assert (end.state, end.restarts) == ("COMPLETED", 1), cluster.evidence(job)
    assert lines_of(cluster, job) >= {"rank 0 went on", "rank 1 went on", "converted"}


def a_time_limit_saves_and_requeues(cluster: Cluster, folder: Path) -> None:
    job = training(cluster, folder, "--time=30", "--signal=B:USR1@900")
    # Less than the 900 s of --signal: Slurm sends the signal at its next check, within 30 s.
    cluster.scontrol("update", f"JobId={job}", "TimeLimit=14")
    cluster.wait_for_output(job, "queueing job")
    assert "restart 1, " in cluster.output(job) and "converted" not in lines_of(cluster, job)
    cluster.scontrol("update", f"JobId={job}", "TimeLimit=30")
    goes_on(cluster, job)
    assert lines_of(cluster, job) >= SAVED, "a rank that saves longer than the other is waited for"


def a_terminated_script_saves_and_requeues(cluster: Cluster, folder: Path) -> None:
    """srun would answer the script's TERM by killing every rank at once."""
    job = training(cluster, folder)
    cluster.run("scancel", "--batch", "--signal=TERM", str(job))
    goes_on(cluster, job)
    assert lines_of(cluster, job) >= SAVED


def an_interrupted_script_saves_and_ends(cluster: Cluster, folder: Path) -> None:
    job = training(cluster, folder)
    cluster.run("scancel", "--batch", "--signal=INT", str(job))
    assert cluster.wait(job) == ("FAILED", 75, 0), cluster.evidence(job)
    assert lines_of(cluster, job) >= SAVED


def a_second_interrupt_ends_ranks_that_hang(cluster: Cluster, folder: Path) -> None:
    hangs = (
        'trap "echo rank $RANK hangs" USR1; echo "rank $RANK works"; while true; do sleep 0.2; done'
    )
    job = training(cluster, folder, body=f"run_stage train on_every_rank bash -c '{hangs}'")
    cluster.run("scancel", "--batch", "--signal=INT", str(job))
    cluster.wait_for_output(job, " hangs", count=2)
    cluster.run("scancel", "--batch", "--signal=INT", str(job))
    assert cluster.wait(job) == ("FAILED", 130, 0), cluster.evidence(job)


def a_cancelled_job_stays_cancelled(cluster: Cluster, folder: Path) -> None:
    """Although its stage fails at the signal, with a code that is retried."""
    body = """run_stage train here bash -c 'trap "exit 70" TERM; echo works; sleep 100 & wait'"""
    job = submit(cluster, folder, body, "--requeue")
    cluster.wait_for_output(job, "works\n")
    cluster.run("scancel", str(job))
    end = cluster.wait(job)
    assert (end.state, end.restarts) == ("CANCELLED", 0), cluster.evidence(job)
    assert "queueing job" not in cluster.output(job)


def a_killed_rank_requeues_its_job(cluster: Cluster, folder: Path) -> None:
    job = training(cluster, folder, EXIT_GRACE_S="8")
    following = cluster.sbatch(
        f"--dependency=afterany:{job}", "--output=/dev/null", "--wrap=true", cwd=folder
    )
    ranks = {
        rank: int(pid) for rank, pid in re.findall(r"rank (\d) works as (\d+)", cluster.output(job))
    }
    psutil.Process(ranks["1"]).kill()
    goes_on(cluster, job)
    assert not [pid for pid in ranks.values() if psutil.pid_exists(pid)], (
        "ranks of the first attempt live on"
    )
    assert cluster.wait(following).state == "COMPLETED"
    assert cluster.job(following)["StartTime"] >= cluster.job(job)["EndTime"], (
        "it waits through requeues"
    )


def one_task_of_an_array_is_requeued_alone(cluster: Cluster, folder: Path) -> None:
    """The last task of an array has the number of the whole array, too."""
    body = f"""\
work() {{
    while [[ $SLURM_ARRAY_TASK_ID == 0 && ! -e {folder}/done ]]; do sleep 0.2; done
    [[ $SLURM_ARRAY_TASK_ID == 0 || ${{SLURM_RESTART_COUNT:-0}} == 1 ]] || exit 75
    touch {folder}/done
}}
run_stage tokenize work"""
    array = submit(
        cluster, folder, body, "--array=0-1", "--requeue", "--open-mode=append", "--output=%a.out"
    )

    def task(number: int) -> str:
        return cluster.scontrol("show", "job", f"{array}_{number}", "--oneliner")

    assert wait_until(lambda: "JobState=PENDING" in task(1) and "Restarts=1" in task(1)), task(1)
    cluster.scontrol("update", f"JobId={array}_1", "StartTime=now+5")
    assert wait_until(lambda: all("JobState=COMPLETED" in task(number) for number in range(2))), (
        task(0) + task(1)
    )
    assert "Restarts=0" in task(0)


def ranks_meet_over_both_nodes(cluster: Cluster, folder: Path) -> None:
    body = "run_stage meet on_every_rank python -m tests.slurm.meet"
    job = submit(cluster, folder, body, "--nodes=2", "--ntasks-per-node=2")
    assert cluster.wait(job).state == "COMPLETED", cluster.evidence(job)
    output = cluster.output(job)
    assert lines_of(cluster, job) >= {
        f"rank {rank} of 4 on n{1 + rank // 2} by gloo: sum 10" for rank in range(4)
    }
    assert f"4 ranks over 2 nodes (n[1-2]), rendezvous at 127.0.0.1:{15000 + job}" in output


def a_shell_of_srun_starts_the_ranks(cluster: Cluster, folder: Path) -> None:
    """`srun --pty bash` holds the allocation; the ranks share it, and do not wait for it."""
    script = stage_script(folder, "run_stage meet on_every_rank python -m tests.slurm.meet")
    command = ["srun", "--nodes=2", "--pty", "bash", str(script)]
    environment = cluster.environment | {"CONFIG": str(run_config(folder))}
    with terminal(command, environment, folder) as opened:
        assert opened.end() == 0, opened.written
    assert "the ranks share its CPUs and GPUs (srun --overlap)" in opened.written
    for rank in range(2):
        assert f"rank {rank} of 2 on n{1 + rank} by gloo: sum 3" in opened.written


def a_fault_in_a_shell_of_srun_leaves_the_shell(cluster: Cluster, folder: Path) -> None:
    """Only the ranks are killed, which outlive their srun."""
    rank = f"bash -c 'echo $$ >$0/rank.$RANK; sleep 2000 & wait' {folder}"
    script = stage_script(folder, f"run_stage train on_every_rank {rank}")
    shell = ["srun", "--nodes=2", "--pty", "bash", "--norc"]
    with terminal(shell, cluster.environment, folder) as opened:
        opened.press(f"bash {script}; echo ended with $?\n")
        opened.wait_for("2 ranks over 2 nodes")

        def ranks() -> list[int]:
            return [int(path.read_text() or 0) for path in folder.glob("rank.*")]

        assert wait_until(lambda: len(ranks()) == 2 and all(ranks())), opened.written
        for process in psutil.process_iter(["name", "cmdline"]):
            line = process.info["cmdline"] or []
            if process.info["name"] == "srun" and {"slurm/launch.sh", str(folder)} <= {*line}:
                process.kill()  # also its child, which would end the ranks
        opened.wait_for("ended with 137")
        assert wait_until(lambda: not any(map(psutil.pid_exists, ranks()))), opened.written
        opened.press("exit 0\n")
        assert opened.end() == 0, opened.written


Scenario = Callable[[Cluster, Path], None]
SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        a_time_limit_saves_and_requeues,
        a_terminated_script_saves_and_requeues,
        an_interrupted_script_saves_and_ends,
        a_second_interrupt_ends_ranks_that_hang,
        a_cancelled_job_stays_cancelled,
        a_killed_rank_requeues_its_job,
        one_task_of_an_array_is_requeued_alone,
        ranks_meet_over_both_nodes,
        a_shell_of_srun_starts_the_ranks,
        a_fault_in_a_shell_of_srun_leaves_the_shell,
    )
}


def run_scenario(scenario: Scenario, cluster: Cluster, new_folder: Callable[[], Path]) -> None:
    """Runs a scenario, and again where a slurmd crashed meanwhile, which is no fault of ours."""
    for attempt in range(1, ATTEMPTS + 1):
        crashes = cluster.slurmd_restarts
        try:
            scenario(cluster, new_folder())
            return
        except (AssertionError, ClusterError):
            if cluster.slurmd_restarts == crashes or attempt == ATTEMPTS:
                raise


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """The scenarios whose tests were selected, by name, all running."""
    chosen = [
        item.callspec.params["name"] for item in request.session.items if item.path == request.path
    ]
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        running = {}
        for name in chosen:
            new_folder = partial(tmp_path_factory.mktemp, "job")
            running[name] = pool.submit(run_scenario, SCENARIOS[name], slurm_cluster, new_folder)
            time.sleep(BETWEEN_STARTS_S)
        yield running


QUICK = ("a_time_limit_saves_and_requeues", "a_killed_rank_requeues_its_job")
"""The scenarios of `make test`: a time limit and a kill."""


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SCENARIOS],
)
def test_a_job(outcomes: dict[str, Future[None]], name: str):
    outcomes[name].result()
