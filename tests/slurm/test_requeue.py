"""After a fault that is not the user's, a job is requeued, or a stage without Slurm is restarted, up to a limit.

A run folder that cannot be written ends the script in one line, whatever is known of earlier attempts.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from pipeline.errors import PASSING_FAULT, USER_ERROR, worth_another_attempt
from pipeline.run_folder.attempts import read_attempts
from tests.slurm.cluster import MESSAGE_TIMEOUT, Cluster
from tests.slurm.conftest import Scenario
from tests.slurm.jobs import PROJECT, REQUEUED, bash, run_config, stage_script, submit
from tests.waiting import wait_until

# A stage whose first attempt lasts until it is killed. $FOLDER has the process ids of the ranks.
LASTING = """\
run_stage train on_every_rank bash -c '
    [[ ${SLURM_RESTART_COUNT:-0} == 0 ]] || { echo "rank $RANK went on"; exit 0; }
    trap "exit 75" TERM
    echo $$ > $FOLDER/written.$RANK; mv $FOLDER/written.$RANK $FOLDER/rank.$RANK.pid
    sleep 200 & wait'
echo "the stage is done"
"""


def killed_rank_requeues(cluster: Cluster, folder: Path) -> None:
    job = submit(cluster, folder, LASTING, *REQUEUED, FOLDER=str(folder), EXIT_GRACE_S="8")
    after = ("--parsable", f"--dependency=afterany:{job}", "--output=/dev/null", "--wrap=true")
    following = int(cluster.run("sbatch", *after, cwd=folder))
    cluster.wait_for(job, lambda _: len(list(folder.glob("rank.*.pid"))) == 2)
    first = [int(path.read_text()) for path in folder.glob("rank.*.pid")]
    psutil.Process(int((folder / "rank.1.pid").read_text())).kill()
    cluster.start_now(job)
    end = cluster.wait(job)
    assert (end.state, end.restarts) == ("COMPLETED", 1), cluster.evidence(job)
    lines = cluster.output(job).splitlines()
    assert {"rank 0 went on", "rank 1 went on", "the stage is done"} <= set(lines)
    assert not [pid for pid in first if psutil.pid_exists(pid)], "ranks of the first attempt live on"
    assert cluster.wait(following).state == "COMPLETED"
    assert cluster.job(following)["StartTime"] >= cluster.job(job)["EndTime"], "it waits through requeues"


def one_array_task_is_requeued_alone(cluster: Cluster, folder: Path) -> None:
    """The last task of an array has the number of the whole array, too."""
    body = f"""\
work() {{
    while [[ $SLURM_ARRAY_TASK_ID == 0 && ! -e {folder}/done ]]; do sleep 0.2; done
    [[ $SLURM_ARRAY_TASK_ID == 0 || ${{SLURM_RESTART_COUNT:-0}} == 1 ]] || exit 75
    touch {folder}/done
}}
run_stage tokenize work"""
    options = ("--array=0-1", "--requeue", "--open-mode=append", f"--output={folder}/%a.out")
    array = submit(cluster, folder, body, *options)

    def task(number: int) -> str:
        return cluster.scontrol("show", "job", f"{array}_{number}", "--oneliner")

    assert wait_until(lambda: "JobState=PENDING" in task(1) and "Restarts=1" in task(1)), task(1)
    cluster.scontrol("update", f"JobId={array}_1", "StartTime=now+5")
    assert wait_until(lambda: all("JobState=COMPLETED" in task(number) for number in range(2))), task(0) + task(1)
    assert "Restarts=0" in task(0)


SCENARIOS: dict[str, Scenario] = {
    "rank killed": killed_rank_requeues,
    "one task of an array": one_array_task_is_requeued_alone,
}


@pytest.mark.slurm
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job(outcomes: dict[str, Future[None]], name: str):
    outcomes[name].result()


@pytest.mark.slurm
def test_a_job_requeues_itself_when_the_controller_is_back(slurm_cluster: Cluster, tmp_path: Path):
    """It asks for a requeue while slurmctld is stopped."""
    body = f"""\
go_on() {{
    [[ ${{SLURM_RESTART_COUNT:-0}} == 0 ]] || exit 0
    echo $$ > {tmp_path}/begun
    while [[ ! -e {tmp_path}/away ]]; do sleep 0.1; done
    exit 75
}}
export SLURM_CONF={tmp_path}/slurm.conf
run_stage train go_on"""
    impatient = tmp_path / "slurm.conf"
    impatient.write_text(slurm_cluster.conf.read_text().replace(MESSAGE_TIMEOUT, "MessageTimeout=2"))
    job = submit(slurm_cluster, tmp_path, body, "--requeue", "--open-mode=append", f"--output={tmp_path}/out")
    assert wait_until(lambda: (tmp_path / "begun").exists()), slurm_cluster.evidence(job)
    slurm_cluster.stop_controller()
    try:
        (tmp_path / "away").touch()
        assert wait_until(lambda: "; asking again for 300 s" in (tmp_path / "out").read_text())
    finally:
        slurm_cluster.start_controller()
    slurm_cluster.start_now(job)
    end = slurm_cluster.wait(job)
    assert (end.state, end.restarts) == ("COMPLETED", 1), slurm_cluster.evidence(job)


# A stage of two ranks whose first attempt fails and whose second succeeds.
FAILS_ONCE = """\
import os, signal, time
os.write(1, f"rank {os.environ['RANK']} in {os.environ['ATTEMPT']}\\n".encode())
if os.environ["ATTEMPT"].endswith(".0"):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.FAULT)
        time.sleep(100)
    raise SystemExit(69)
"""


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_without_slurm_a_stage_is_run_again_after_a_fault(tmp_path: Path, fault: str):
    program = tmp_path / "program.py"
    program.write_text(FAILS_ONCE.replace("FAULT", fault), encoding="utf-8")
    body = f"run_stage train on_every_rank python {program}; echo went on"
    env = {"NPROC": "2", "EXIT_GRACE_S": "5", "CONFIG": str(run_config(tmp_path))}
    result = bash(stage_script(tmp_path, body), **env)
    assert result.returncode == 0, result.stderr
    assert "another attempt at train: restart 1, 1 of at most 3 without progress" in result.stdout
    assert result.stdout.splitlines()[-1] == "went on"
    [ended] = [attempt.ended for attempt in read_attempts(tmp_path / "run")]
    assert ended is not None and ended.exit_code in (69, 137)


def test_a_decision_that_cannot_be_made_does_not_end_the_run(tmp_path: Path):
    """The run's configuration cannot be read when scale-cpt may-retry wants to."""
    body = "fail_once() { rm -f $CONFIG; [[ $ATTEMPT != *.0 ]] || exit 70; }\nrun_stage train fail_once"
    result = bash(stage_script(tmp_path, body), CONFIG=str(run_config(tmp_path)))
    assert result.returncode == 0, result.stderr
    assert "No such file" in result.stderr
    assert "another attempt at train: scale-cpt may-retry itself ended with exit code 70" in result.stdout


def test_without_python_the_scripts_decide_as_python_does(tmp_path: Path):
    body = "PATH=/nowhere; for code in {1..255}; do if may_go_on train $code >&2; then echo $code; fi; done"
    result = bash(stage_script(tmp_path, body), CONFIG=str(run_config(tmp_path)))
    assert result.stdout.split() == [str(code) for code in range(1, 256) if worth_another_attempt(code)], result.stderr


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
