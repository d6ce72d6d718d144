"""Stages without Slurm: stopped, they save and end the script; after a fault they may run again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import USER_ERROR, worth_another_attempt
from pipeline.run_folder.attempts import read_attempts
from tests.slurm.jobs import BASH, PROJECT, bash, run_config, stage_script, without_slurm
from tests.terminal import CTRL_C, Terminal, terminal
from tests.waiting import wait_until

pytestmark = pytest.mark.full


def test_the_ranks_meet_on_this_machine(tmp_path: Path):
    script = stage_script(tmp_path, "run_stage meet on_every_rank python -m tests.slurm.meet")
    result = bash(script, NPROC="2", DS_ACCELERATOR="cpu")
    assert result.returncode == 0, result.stderr
    assert "no Slurm allocation: 2 processes on this machine" in result.stdout
    assert {f"rank {rank} of 2 on here by gloo: sum 3" for rank in range(2)} <= set(
        result.stdout.splitlines()
    )


@pytest.mark.parametrize("code", [2, 75])
def test_the_script_ends_as_its_ranks_do(tmp_path: Path, code: int):
    """Two lines on stderr, the ranks' and the script's.

    torchrun alone adds a traceback, and ends with 1.
    """
    (program := tmp_path / "program.py").write_text(
        "import os, sys\n"
        f"if os.environ['RANK'] == '0': print('error: why', file=sys.stderr)\nsys.exit({code})"
    )
    body = f"run_stage train on_every_rank python {program}\nrun_stage second here echo second"
    result = bash(stage_script(tmp_path, body), NPROC="2", EXIT_GRACE_S="300")
    assert result.returncode == code and "second" not in result.stdout
    assert result.stderr.splitlines()[0] == "error: why"
    assert len(result.stderr.splitlines()) == (1 if code == 75 else 2)


@pytest.mark.parametrize(
    ("how", "stage", "code", "said"),
    [
        (signal.SIGTERM, "exec sleep 1234", 75, "the same command resumes from there"),
        (signal.SIGINT, "exec sleep 1234", 130, "the same command resumes from there"),
        (signal.SIGTERM, 'trap "exit 70" TERM; sleep 1234 & wait', 70, "caught SIGTERM"),
    ],
)
def test_a_stopped_script_stops_its_stage_and_starts_no_other(
    tmp_path: Path, how, stage: str, code: int, said: str
):
    """Nor the same again, if it fails while it stops."""
    script = stage_script(
        tmp_path, f"run_stage first here bash -c 'echo works; {stage}'\nrun_stage second here true"
    )
    env = without_slurm(CONFIG=str(run_config(tmp_path)))
    with subprocess.Popen(
        ["bash", str(script)], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert (
            process.stdout.readline().endswith("] first\n")
            and process.stdout.readline() == "works\n"
        )
        process.send_signal(how)
        output = (
            process.stdout.read()
        )  # ends when the last holder of the pipe has gone, the stage included
    assert process.returncode == code
    assert said in output and "second" not in output and "another attempt" not in output


@pytest.mark.parametrize("how", ["USR1", "TERM", "INT"])
def test_a_stop_between_two_stages_starts_no_other(tmp_path: Path, how: str):
    body = f"run_stage first here true\nkill -{how} $$\nrun_stage next here echo second"
    result = bash(stage_script(tmp_path, body))
    assert result.returncode == 75
    assert "stopped at next" in result.stdout and "second" not in result.stdout


# A stage of two ranks whose first attempt fails and whose second succeeds.
FAILS_ONCE = """\
import os, signal, time
if os.environ["ATTEMPT"].endswith(".0"):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.FAULT)
        time.sleep(100)
    raise SystemExit(69)
"""


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_stage_is_run_again_after_a_fault(tmp_path: Path, fault: str):
    (program := tmp_path / "program.py").write_text(FAILS_ONCE.replace("FAULT", fault))
    script = stage_script(tmp_path, f"run_stage train on_every_rank python {program}; echo went on")
    result = bash(script, NPROC="2", EXIT_GRACE_S="5", CONFIG=str(run_config(tmp_path)))
    assert result.returncode == 0, result.stderr
    assert "another attempt at train: restart 1, 1 of at most 3 without progress" in result.stdout
    assert result.stdout.splitlines()[-1] == "went on"
    [ended] = [attempt.end for attempt in read_attempts(tmp_path / "run")]
    assert ended is not None and ended.exit_code in (69, 137)


def test_a_decision_that_cannot_be_made_does_not_end_the_run(tmp_path: Path):
    """The run's configuration cannot be read when scale-cpt may-retry wants to."""
    fail_once = "fail_once() { rm -f $CONFIG; [[ $ATTEMPT != *.0 ]] || exit 70; }"
    body = f"{fail_once}\nrun_stage train fail_once"
    result = bash(stage_script(tmp_path, body), CONFIG=str(run_config(tmp_path)))
    assert result.returncode == 0, result.stderr
    assert (
        "another attempt at train: scale-cpt may-retry itself ended with exit code 70"
        in result.stdout
    )


def test_without_python_the_scripts_decide_as_python_does(tmp_path: Path):
    body = (
        "PATH=/nowhere; for code in {1..255}; do"
        " if may_go_on train $code >&2; then echo $code; fi; done"
    )
    result = bash(stage_script(tmp_path, body), CONFIG=str(run_config(tmp_path)))
    assert result.stdout.split() == [
        str(code) for code in range(1, 256) if worth_another_attempt(code)
    ], result.stderr


@pytest.mark.parametrize(("stage", "fault"), [("train", "Read-only"), ("tokenize", "Not a")])
def test_a_folder_that_cannot_be_written_ends_the_script_in_one_line(
    tmp_path: Path, small_disk, stage, fault
):
    disk = small_disk(mib=1)
    (disk.path / "file").touch()
    disk.make_read_only()
    folder = disk.path / ("run" if fault == "Read-only" else "file/run")
    result = bash(
        PROJECT / "slurm" / "cpt_korean.sh", str(run_config(tmp_path, folder)), stage, NPROC="2"
    )
    assert result.returncode == USER_ERROR, result.stderr
    (line,) = (
        line
        for line in result.stderr.splitlines()
        if line.startswith("error: ") and "stage" not in line
    )
    assert str(disk.path) in line and fault in line
    assert "Traceback" not in result.stderr and "another attempt" not in result.stdout


@pytest.mark.parametrize(
    ("answer", "patience_s", "asked", "code"),
    [
        ("Unable to contact slurm controller (connect failure)", "300", 3, 0),
        ("Unable to contact slurm controller (connect failure)", "0", 1, 71),
        ("Invalid node name specified", "300", 1, 71),
    ],
)
def test_a_request_is_repeated_until_slurmctld_answers(
    tmp_path: Path, answer, patience_s, asked, code
):
    """A rendezvous that Slurm does not answer for is its fault, as are those of srun."""
    body = f"""\
scontrol() {{
    echo "$*" >>{tmp_path}/asked
    [[ $2 == hostnames || $(wc -l <{tmp_path}/asked) -ge 3 ]] || {{ echo "{answer}"; return 1; }}
    [[ $2 == hostnames ]] && echo n1 || echo "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1 x"
}}
SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_PATIENCE_S={patience_s}
find_rendezvous
echo $MASTER_ADDR"""
    result = bash(stage_script(tmp_path, body))
    assert result.returncode == code, result.stderr
    assert (tmp_path / "asked").read_text().count("show node n1 --oneliner") == asked
    assert result.stdout == ("10.0.0.1\n" if code == 0 else "")
    assert code == 0 or f"error: scontrol show node n1 --oneliner: {answer}" in result.stderr


# A stage of two ranks that need a second to save.
SAVES = """\
import os, signal, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]

def save(number, frame):
    time.sleep(1)
    open(f"{folder}/saved.{rank}", "w").close()
    sys.exit(75)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
# One write, as print makes two: another rank's line may come between text and line end.
os.write(2, f"rank {rank} works\\n".encode())
time.sleep(600)
open(f"{folder}/went.on.{rank}", "w").close()
"""


@contextlib.contextmanager
def two_ranks_in_a_terminal(folder: Path, pipe: str) -> Iterator[Terminal]:
    """A script whose stage they are; `pipe` stands after the command, as a user would type it."""
    (program := folder / "program.py").write_text(SAVES)
    script = stage_script(
        folder, f"run_stage train on_every_rank python {program} {folder}\nrun_stage next here true"
    )
    env = without_slurm(NPROC="2", CONFIG=str(run_config(folder)), EXIT_GRACE_S="300")
    with terminal(
        ["bash", "-c", f"bash {script} {pipe}; exit ${{PIPESTATUS[0]}}"], env, folder
    ) as opened:
        for rank in range(2):
            opened.wait_for(
                f"rank {rank} works\r\n"
            )  # the whole line: it is written before anything else happens
        yield opened


def saved_by(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("saved.*"))


@pytest.mark.parametrize("pipe", ["", "| tee log", "2>&1 | tee log"])
def test_a_keystroke_stops_every_rank_also_where_it_ends_the_reader_of_the_output(
    tmp_path: Path, pipe: str
):
    with two_ranks_in_a_terminal(tmp_path, pipe) as opened:
        opened.press(CTRL_C)
        opened.end()  # also the end of the last process that has the terminal open
    # A rank whose output goes into a pipe may outlast the terminal.
    wait_until(lambda: len(saved_by(tmp_path)) == 2, timeout_s=60)
    assert saved_by(tmp_path) == ["saved.0", "saved.1"], opened.written
    assert not list(tmp_path.glob("went.on.*")) and "] next" not in opened.written
    if "2>&1" not in pipe:  # else nobody reads what the script says
        assert "caught SIGINT: asked the stage to save and stop" in opened.written
        assert "the same command resumes from there" in opened.written


def test_a_closed_terminal_stops_every_rank(tmp_path: Path):
    with two_ranks_in_a_terminal(tmp_path, "") as opened:
        opened.hang_up()
        assert wait_until(lambda: saved_by(tmp_path) == ["saved.0", "saved.1"], every_s=0.05)


@pytest.mark.parametrize("how", ["QUIT", "an error of the script"])
def test_a_script_that_ends_in_another_way_stops_its_stage(tmp_path: Path, how: str):
    (program := tmp_path / "program.py").write_text(SAVES)
    # A trap's command that fails ends a script that is run with `set -e`.
    body = f"trap 'false' USR2\nrun_stage train on_every_rank python {program} {tmp_path}"
    env = without_slurm(NPROC="2", CONFIG=str(run_config(tmp_path)))
    command = [*BASH, str(stage_script(tmp_path, body))]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert sorted(process.stderr.readline() for _ in range(2)) == [
            "rank 0 works\n",
            "rank 1 works\n",
        ]
        process.send_signal(signal.SIGQUIT if how == "QUIT" else signal.SIGUSR2)
        process.stderr.read()  # ends with the last rank
    assert process.returncode not in (0, 75)
    assert saved_by(tmp_path) == ["saved.0", "saved.1"]
