"""What the batch scripts call, without Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.observers import trackers
from tests.slurm.jobs import PROJECT, bash, stage_script

DEMO = "configs/demo.yaml"


def test_modules_that_use_unset_variables_are_loaded(tmp_path: Path):
    (site := tmp_path / "site.env").write_text('module() { echo "$1 ${@:2}$NOT_SET"; }')
    result = bash(stage_script(tmp_path, ""), SITE_ENV=str(site), MODULES="cuda gcc/13")
    assert (result.returncode, result.stdout) == (0, "load cuda gcc/13\n"), result.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("cpt_korean.sh", ["configs/nowhere.yaml"], "CONFIG=configs/nowhere.yaml: no such file"),
        ("cpt_korean.sh", ["pyproject.toml", "fly"], 'STAGES: there is no stage "fly"'),
        ("cpt_korean.sh", ["--dryrun"], "unknown option --dryrun; did you mean --dry-run?"),
        ("cpt_korean.sh", [DEMO, "--steps"], "unknown option --steps; the options are --dry-run"),
        ("cpt_korean.sh", [DEMO, "train", "--dry-run"], "--dry-run: give it before stages"),
        ("cpt_korean.sh", [DEMO, "--set"], "--set: expected KEY=VALUE after it"),
        # Before the stages in front of it, which may take days.
        ("cpt_korean.sh", [DEMO, "clean", "fly"], 'STAGES: there is no stage "fly"; choose'),
        ("../studies/run_study.sh", ["nowhere.yaml"], "STUDY=nowhere.yaml: no such file"),
    ],
)
def test_a_mistake_on_the_command_line_ends_in_one_line(
    name: str, arguments: list[str], complaint: str
):
    result = bash(PROJECT / "slurm" / name, *arguments)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: {complaint}")


@pytest.mark.parametrize("arguments", [["--help"], [DEMO, "-h"]])
def test_help_prints_the_usage_and_starts_nothing(arguments: list[str]):
    result = bash(PROJECT / "slurm" / "cpt_korean.sh", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: bash slurm/cpt_korean.sh [CONFIG]")
    assert result.stdout.endswith("docs/clusters.md has more.\n")


@pytest.mark.parametrize("arguments", [[], [DEMO]])
def test_outside_slurm_the_default_run_is_named_before_it_starts(arguments: list[str]):
    result = bash(PROJECT / "slurm" / "cpt_korean.sh", *arguments, STAGES="fly")
    named = "no run is named: this is the default, configs/cpt_korean_llama3.2_1b.yaml;"
    assert (named in result.stdout) == (not arguments)


@dataclass
class Recorded:
    """A host whose `programs` write down their calls, and whose PATH has no python but theirs."""

    folder: Path

    def program(self, name: str, then: str = "") -> None:
        path = self.folder / name
        path.write_text(
            f'#!/bin/bash\necho "{name} $@" >> {self.folder}/calls\n'
            f"env > {self.folder}/{name}.env\n{then}\n"
        )
        path.chmod(0o755)

    def environment_of(self, name: str) -> dict[str, str]:
        lines = (self.folder / f"{name}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def run(self, name: str, *arguments: str, cwd: Path = PROJECT, **environment: str) -> list[str]:
        """The calls that a script makes; `name` is its path in `cwd`, or else in slurm/."""
        tools = {"PATH": str(self.folder), "VENV": str(self.folder), **environment}
        script = name if (cwd / name).exists() else str(PROJECT / "slurm" / name)
        command = ["bash", script, *arguments]
        done = subprocess.run(
            command, env=tools, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Recorded:
    for tool in (
        "bash",
        "env",
        "date",
        "nproc",
        "sed",
        "sort",
        "grep",
        "wc",
        "sleep",
        "cat",
        "dirname",
    ):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    return Recorded(tmp_path)


@pytest.mark.parametrize(
    ("environment", "options", "planned"),
    [
        ({}, [], f"--gpus 2 --gpus-per-node 1 {DEMO}"),
        ({"NPROC": "4"}, [], DEMO),
        (
            {"SBATCH_GPUS_PER_NODE": "h100:8"},
            ["--gpus=8"],
            f"--gpus 16 --gpus-per-node 8 {DEMO} --gpus=8",
        ),
    ],
)
def test_a_dry_run_plans_for_what_sbatch_would_request(
    host: Recorded, environment, options, planned
):
    host.program("sbatch")
    host.program("python")
    (call,) = host.run("cpt_korean.sh", DEMO, "--dry-run", *options, **environment)
    assert call == f"python -m pipeline train --dry-run {planned}"


IN_A_JOB = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/", "SLURM_RESTART_COUNT": "2"}


def test_a_container_without_slurms_commands_uses_its_node_and_says_so(host: Recorded):
    """Not ten minutes of requests to a scontrol that is not there."""
    host.program("python")
    calls = host.run("cpt_korean.sh", DEMO, "convert", "train", **IN_A_JOB)
    assert calls[0].startswith("python -m pipeline convert ")
    assert calls[1].startswith("python -m pipeline.local_ranks 2 -m pipeline train ")
    assert not host.environment_of("python")["ATTEMPT"].startswith("7.")


def test_a_container_without_slurms_commands_on_many_nodes_ends_at_the_start(host: Recorded):
    host.program("python")
    environment = {**IN_A_JOB, "SLURM_JOB_NUM_NODES": "2", "VENV": str(host.folder)}
    script = PROJECT / "slurm" / "cpt_korean.sh"
    done = bash(script, DEMO, **environment, PATH=str(host.folder))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error: this is job 7 on 2 nodes, and there is no scontrol on")
    assert not (host.folder / "calls").exists()


@pytest.mark.parametrize("script", ["cpt_korean.sh", "convert_checkpoint.sh", "tokenize_korean.sh"])
def test_a_configuration_is_found_where_the_user_stands(host: Recorded, tmp_path, script: str):
    """Also in the shell of an allocation, whose folder is another one."""
    user = tmp_path / "user"
    (user / "configs").mkdir(parents=True)
    (user / "mine.yaml").touch()
    (user / "configs" / "demo.yaml").touch()
    host.program("python")
    stages = ["convert"] if script == "cpt_korean.sh" else []
    calls = []
    for config in ("mine.yaml", DEMO, "configs/demo_fft.yaml"):
        calls += host.run(script, config, *stages, cwd=user, SLURM_SUBMIT_DIR="/")[-1:]
    named = [call.split()[4] for call in calls]
    assert named == [f"{user}/mine.yaml", f"{user}/{DEMO}", "configs/demo_fft.yaml"]


@pytest.mark.parametrize(
    ("partitions", "environment", "planned"),
    [
        (["all*|(null)|2000"], {}, "--gpus 2 --gpus-per-node 1 --on-cpu --gpu-memory-gib 2"),
        (["all*|gpu:h100:8|2000"], {}, "--gpus 2 --gpus-per-node 1"),
        (["cpu*|(null)|64000+", "gpu|gpu:8|2000"], {"SBATCH_PARTITION": "gpu"}, "--gpus 2"),
        (
            ["gpu*|gpu:8|2000", "cpu|(null)|64000+"],
            {"SBATCH_PARTITION": "cpu"},
            "--gpus 2 --gpus-per-node 1 --on-cpu --gpu-memory-gib 63",
        ),
        (["all*|(null)|2000"], {"SBATCH_GPUS_PER_NODE": "8"}, "--gpus 16 --gpus-per-node 8"),
        (["other|(null)|2000"], {}, "--gpus 2 --gpus-per-node 1"),
    ],
)
def test_a_dry_run_plans_no_gpus_where_slurm_knows_of_none(
    host: Recorded, partitions, environment, planned
):
    host.program("sbatch")
    host.program("sinfo", f"printf '%s\\n' {' '.join(map(repr, partitions))}")
    host.program("python")
    call = host.run("cpt_korean.sh", DEMO, "--dry-run", **environment)[-1]
    options = call.removeprefix("python -m pipeline train --dry-run ").removesuffix(f" {DEMO}")
    assert options.startswith(planned)
    assert ("--on-cpu" in options) == ("--on-cpu" in planned)


@pytest.mark.parametrize("cwd", ["slurm", "slurm/..", "tests/slurm"])
def test_a_dry_run_plans_the_same_from_every_folder(host: Recorded, cwd: str):
    host.program("sbatch")
    host.program("python")
    folder = PROJECT / cwd
    script = os.path.relpath(PROJECT / "slurm" / "cpt_korean.sh", folder)
    (call,) = host.run(script, DEMO, "--dry-run", cwd=folder)
    assert call == f"python -m pipeline train --dry-run --gpus 2 --gpus-per-node 1 {DEMO}"


@pytest.mark.parametrize(
    ("line", "planned"),
    [
        ("#SBATCH --nodes=3", "--gpus 3 --gpus-per-node 1"),
        ("#SBATCH -N 3-5", "--gpus 3 --gpus-per-node 1"),
        ("#SBATCH --ntasks=1", "--gpus 1 --gpus-per-node 1"),  # one node, as sbatch would allocate
        ("#SBATCH -N2", "--gpus 2 --gpus-per-node 1"),
    ],
)
def test_a_dry_run_of_a_users_own_script_plans_what_its_lines_request(
    host: Recorded, tmp_path, line, planned
):
    text = (PROJECT / "slurm" / "cpt_korean.sh").read_text().replace("#SBATCH --nodes=2", line)
    (tmp_path / "mine.sh").write_text(text)
    host.program("sbatch")
    host.program("python")
    (call,) = host.run("mine.sh", DEMO, "--dry-run", cwd=tmp_path, PROJECT=str(PROJECT))
    assert call == f"python -m pipeline train --dry-run {planned} {DEMO}"


def test_the_first_argument_may_be_a_stage(host: Recorded):
    host.program("python")
    [call] = host.run("cpt_korean.sh", "convert", CONFIG=DEMO)
    assert call == f"python -m pipeline convert {DEMO}"


def test_changes_of_settings_and_the_number_of_ranks_reach_every_stage(host: Recorded):
    host.program("python")
    changes = (DEMO, "--set", "name=two words", "--set=seed=7")
    calls = host.run("cpt_korean.sh", *changes, NPROC="3")
    assert len(calls) == 8
    assert all(call.endswith(" --set=name=two words --set=seed=7") for call in calls)
    assert host.environment_of("python")["EXPECTED_WORLD_SIZE"] == "3"
    planned = host.run("cpt_korean.sh", *changes, "--dry-run", "--json", NPROC="2")[-1]
    assert (
        planned.startswith(f"python -m pipeline train --dry-run {DEMO}")
        and "--set=seed=7 --json" in planned
    )


def test_a_container_needs_no_python_on_the_host(host: Recorded):
    """The image's python runs, with this checkout's code."""
    image = Recorded(host.folder / "image")
    image.folder.mkdir()
    image.program("python")
    host.program("apptainer", f'PATH={image.folder}:$PATH; exec env IN_IMAGE=yes "${{@:3}}"')
    calls = host.run("cpt_korean.sh", DEMO, CONTAINER="apptainer exec image.sif", NPROC="2")
    assert [call.split()[:4] for call in calls] == [
        ["apptainer", "exec", "image.sif", "python"]
    ] * 8
    environment = image.environment_of("python")
    assert (environment["IN_IMAGE"], environment["PYTHONPATH"]) == ("yes", str(PROJECT))
    absent = bash(PROJECT / "slurm" / "cpt_korean.sh", CONTAINER="docker-of-nobody run image")
    assert (absent.returncode, absent.stderr.count("\n")) == (
        1,
        1,
    ) and "no docker-of-nobody on PATH" in absent.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [DEMO, "--set=seed=7", "--format", "scale", "--output", "two words"],
        ["--checkpoint", "runs/demo/checkpoints/step_00000002", "--base", "b", "--output", "o"],
    ],
    ids=["a run", "a checkpoint"],
)
def test_a_conversion_gets_the_flags_of_the_script(host: Recorded, arguments: list[str]):
    host.program("python")
    (call,) = host.run("convert_checkpoint.sh", *arguments, CONFIG="configs/demo_fft.yaml")
    assert call == f"python -m pipeline convert {' '.join(arguments)}"
    assert host.environment_of("python")["STAGE"] == "convert"


def test_paths_of_a_conversion_begin_where_the_user_stands(host: Recorded, tmp_path: Path):
    host.program("python")
    (tmp_path / "step_00000002").mkdir()
    options = ("--checkpoint", "step_00000002", "--base=org/name", "--output=exported")
    (call,) = host.run("convert_checkpoint.sh", *options, cwd=tmp_path)
    expected = f"--checkpoint {tmp_path}/step_00000002 --base=org/name --output={tmp_path}/exported"
    assert call == f"python -m pipeline convert {expected}"


def test_without_slurm_a_chain_of_jobs_plans_and_says_what_it_does_not_use(host: Recorded):
    host.program("python")
    calls = host.run("submit_pipeline.sh", DEMO, "--dry-run", "--json")
    assert calls[-1].startswith(f"python -m pipeline train --dry-run {DEMO}")
    assert calls[-1].endswith("--json")
    done = bash(PROJECT / "slurm" / "submit_pipeline.sh", "--help")
    assert done.returncode == 0 and "Without Slurm the stages run one after" in done.stdout


def test_a_conversion_without_a_run_ends_with_its_fault(host: Recorded):
    """There is no run folder in which attempts could be counted: the stage is not tried again."""
    host.program("python", "exit 70")
    script = PROJECT / "slurm" / "convert_checkpoint.sh"
    done = bash(
        script,
        "--checkpoint=c",
        "--base=b",
        "--output=o",
        **{"PATH": str(host.folder), "VENV": str(host.folder)},
    )
    assert done.returncode == 70, done.stderr
    assert (
        host.folder / "calls"
    ).read_text() == "python -m pipeline convert --checkpoint=c --base=b --output=o\n"


@pytest.mark.parametrize(
    ("ends", "code", "restarts", "said", "requeued"),
    [
        ("kill -s USR1 $PPID; exec sleep 100", 75, "2", "attempt at convert: restart 3 of", True),
        ("exit 70", 70, "0", "attempt at convert: restart 1 of at most 3", True),
        ("exit 70", 70, "3", "no further attempt at convert: it was restarted 3 times", False),
        ("exit 1", 1, "0", "", False),
    ],
    ids=["at its time limit", "after a fault", "too often", "after the user's fault"],
)
def test_the_job_of_a_conversion_without_a_run_queues_itself_again(
    host: Recorded, ends: str, code: int, restarts: str, said: str, requeued: bool
):
    """Slurm counts its restarts."""
    host.program("python", ends)
    host.program("scontrol", "[[ $1 == requeue ]] || echo 'JobId=7 JobState=RUNNING '")
    environment = IN_A_JOB | {"PATH": str(host.folder), "VENV": str(host.folder)}
    environment["SLURM_RESTART_COUNT"] = restarts
    script = PROJECT / "slurm" / "convert_checkpoint.sh"
    done = bash(script, "--checkpoint=c", "--base=b", "--output=o", **environment)
    assert done.returncode == code, done.stderr
    assert said in done.stdout
    calls = (host.folder / "calls").read_text().splitlines()
    assert ("scontrol requeue 7" in calls) == requeued


@pytest.mark.parametrize("launcher", ["srun --mpi=pmix", "mpirun -n 4"])
def test_mpi_starts_the_images_python_with_the_hosts_launcher(host: Recorded, launcher: str):
    host.program(launcher.split()[0])
    host.program("apptainer")
    own = {} if launcher.startswith("srun") else {"MPI_LAUNCHER": launcher}
    call, *_ = host.run(
        "tokenize_korean.sh", DEMO, MPI="1", CONTAINER="apptainer exec image.sif", **own
    )
    assert call.startswith(f"{launcher} apptainer exec image.sif python -m pipeline tokenize ")
    assert call.endswith(" --mpi")


@pytest.mark.parametrize(
    ("tasks", "step", "shares"),
    [((10, 20, 30), 10, ["0/3", "1/3", "2/3"]), ((1, 2, 7, 9), 1, ["0/4", "1/4", "2/4", "0/4"])],
)
def test_every_task_of_an_array_gets_a_share_below_their_number(
    host: Recorded, tasks, step, shares
):
    host.program("python")
    array = {
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_MIN": str(min(tasks)),
        "SLURM_ARRAY_TASK_STEP": str(step),
    }
    for task in tasks:
        array |= {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": str(len(tasks))}
        calls = host.run("tokenize_korean.sh", DEMO, **array)
    assert [call.split("--share ")[1] for call in calls] == shares


def test_the_jobs_of_a_study_do_not_inherit_their_submitters_allocation(host: Recorded):
    """srun would take these variables for its own options."""
    host.program("python", rf"printf 'fft\t{DEMO}\ttrain\n'")
    host.program("sbatch", "echo 12")
    host.program("scontrol")
    driver = {
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_CPU": "1000",
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_NTASKS": "1",
    }
    calls = host.run(
        "studies/run_study.sh",
        "studies/configs/korean.yaml",
        **driver,
        SLURM_CONF="/etc/slurm.conf",
        DATA="x",
    )
    assert [call.partition(" ")[0] for call in calls].count("sbatch") == 2
    passed_on = {
        name: value
        for name, value in host.environment_of("sbatch").items()
        if name.startswith("SLURM_")
    }
    assert passed_on == {"SLURM_CONF": "/etc/slurm.conf"}
    assert host.environment_of("sbatch")["DATA"] == "x"


def test_ranks_see_the_gpus_of_their_node_and_wait_for_a_trackers_end(host: Recorded):
    """Also with --gpus-per-task, which srun would bind; W&B takes up to a minute."""
    host.program("srun")
    host.program("python")
    host.program(
        "scontrol",
        "[[ $* != *hostnames* ]]"
        ' && echo "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1 x" || echo n1',
    )
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_NTASKS": "8",
    }
    calls = host.run(
        "cpt_korean.sh", DEMO, "train", **job, SLURM_GPUS_PER_TASK="1", MASTER_PORT="29500"
    )
    (call,) = (call.split() for call in calls if call.startswith("srun "))
    (wait,) = (int(option.partition("=")[2]) for option in call if option.startswith("--wait="))
    assert "--gpu-bind=none" in call and wait > trackers._FINISH_TIMEOUT_S
    environment = host.environment_of("srun")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


IN_A_SHELL_OF_SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_ID": "0",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("stage", "at_first", "killed"),
    [("train", "true", ["7.2"]), ("train", "exit 1", []), ("convert", "true", [])],
    ids=["the stage's", "squeue does not answer", "a stage without steps"],
)
def test_a_stage_that_fails_leaves_the_steps_of_others(
    host: Recorded, stage: str, at_first: str, killed: list[str]
):
    """The user's own shell is one, and so is that of somebody who looks on."""
    steps = host.folder / "steps"
    steps.write_text("7.batch\n7.extern\n7.0\n7.1\n")
    host.program("srun", f"echo 7.2 >>{steps}; exit 2")  # a rank that outlives it
    host.program("squeue", f"[[ -e {host.folder}/srun.env ]] || {at_first}\ncat {steps}")
    host.program("scancel", f"printf '7.batch\\n7.0\\n7.1\\n' >{steps}")
    host.program("scontrol", "[[ $* == *hostnames* ]] && echo n1 || echo NodeName=n1 NodeAddr=::1")
    host.program("python", "exit 2")
    environment = IN_A_SHELL_OF_SRUN | {"PATH": str(host.folder), "VENV": str(host.folder)}
    done = bash(PROJECT / "slurm" / "cpt_korean.sh", DEMO, stage, **environment)
    assert done.returncode == 2, done.stderr
    calls = (host.folder / "calls").read_text().splitlines()
    kills = [call.split() for call in calls if call.startswith("scancel ")]
    assert kills == [["scancel", "--signal=KILL", step] for step in killed]


def test_an_interrupted_job_is_not_queued_again_at_its_time_limit(host: Recorded):
    """Slurm's USR1 may come before the save is done."""
    host.program("scontrol", "echo 'JobId=7 JobState=RUNNING '")
    host.program("python")
    saving = host.folder / "saving"
    body = f"""\
may_go_on() {{ echo yes; }}
on_every_rank() {{
    exec bash -c 'trap "[[ ! -e {saving} ]] || exit 75; >{saving}; kill -s USR1 $PPID" USR1
        kill -s INT $PPID
        while true; do sleep 0.2; done'
}}
run_stage train on_every_rank"""
    environment = IN_A_JOB | {"PATH": str(host.folder), "VENV": str(host.folder), "CONFIG": DEMO}
    done = bash(stage_script(host.folder, body), **environment)
    assert done.returncode == 75, done.stderr
    assert "caught SIGINT: " in done.stdout and "caught SIGUSR1: " in done.stdout
    assert done.stdout.endswith("the same command resumes from there\n")


def test_a_job_that_ends_in_another_way_lets_its_ranks_save(host: Recorded):
    """At TERM srun would kill them."""
    host.program("scontrol")
    host.program("python")
    body = """\
on_every_rank() {
    exec bash -c 'trap "echo saved; exit 75" USR1; kill -s QUIT $PPID; while true; do sleep 0.2; done'
}
run_stage train on_every_rank"""
    environment = IN_A_JOB | {"PATH": str(host.folder), "VENV": str(host.folder)}
    done = bash(stage_script(host.folder, body), **environment)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (131, "saved"), done.stderr


def test_cleaning_whose_next_job_is_refused_does_not_say_done(host: Recorded):
    host.program("python", "echo 'submitted: job 12'")
    host.program("sbatch", "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    host.program("scontrol")
    tools = {"PATH": str(host.folder), "VENV": str(host.folder), "SLURM_JOB_PARTITION": "all"}
    done = bash(PROJECT / "slurm" / "clean_corpus.sh", DEMO, **IN_A_JOB, **tools)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "submitted: job 12"
    assert done.stderr.splitlines()[0] == "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    assert done.stderr.splitlines()[1].startswith("error: no job continues after these arrays")
