"""What the batch scripts call, without Slurm."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.observers import trackers
from tests.slurm.jobs import PROJECT, bash, script

BATCH_SCRIPTS = sorted(
    path for path in (PROJECT / "slurm").glob("*.sh") if "\n#SBATCH" in path.read_text(encoding="utf-8")
)


def by_name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=by_name)
def test_sbatch_lines_have_no_shell_variables(path: Path):
    options = re.findall(r"^#SBATCH (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert options
    assert not [option for option in options if re.search(r"[$`]", option)]


def test_modules_that_use_unset_variables_are_loaded(tmp_path: Path):
    module = 'module() { echo "$1 ${@:2}$NOT_SET"; }'
    result = bash(script(tmp_path, f"{module}\ncd {PROJECT}\nsource slurm/common.sh\nload_site"), MODULES="cuda gcc/13")
    assert (result.returncode, result.stdout) == (0, "load cuda gcc/13\n"), result.stderr


@pytest.mark.parametrize("name", ["convert_checkpoint.sh", "evaluate.sh"])
def test_a_stages_own_script_takes_the_run_as_its_argument(tmp_path: Path, name: str):
    config = tmp_path / "broken.yaml"
    config.write_text("name: broken\n", encoding="utf-8")
    result = bash(PROJECT / "slurm" / name, str(config))
    assert result.returncode == 2
    fault, stage = result.stderr.splitlines()  # the fault itself once
    assert fault.startswith(f"error: {config}: ")
    assert re.match(r"error: stage (convert|evaluate) ended with exit code 2", stage)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["configs/nowhere.yaml"], "CONFIG=configs/nowhere.yaml: no such file"),
        (["pyproject.toml", "fly"], 'STAGES: there is no stage "fly"'),
        (["configs/demo.yaml", "--set"], "--set: expected KEY=VALUE after it"),
    ],
)
def test_a_mistake_on_the_command_line_ends_in_one_line(arguments: list[str], complaint: str):
    result = bash(PROJECT / "slurm" / "cpt_korean.sh", *arguments)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: {complaint}")


@dataclass
class Recorded:
    """A host whose `programs` write down how they were called, and whose PATH has no python but theirs."""

    folder: Path

    def program(self, name: str, then: str = "") -> None:
        path = self.folder / name
        path.write_text(
            f'#!/bin/bash\necho "{name} $@" >> {self.folder}/calls\nenv > {self.folder}/{name}.env\n{then}\n'
        )
        path.chmod(0o755)

    def environment_of(self, name: str) -> dict[str, str]:
        return dict(
            line.split("=", 1) for line in (self.folder / f"{name}.env").read_text().splitlines() if "=" in line
        )

    def run(self, name: str, *arguments: str, ends: int = 0, **environment: str) -> list[str]:
        """The calls that a script of slurm/ makes."""
        tools = {"PATH": str(self.folder), "VENV": str(self.folder), **environment}
        command = ["bash", str(PROJECT / "slurm" / name), *arguments]
        done = subprocess.run(command, env=tools, cwd=PROJECT, capture_output=True, text=True, check=False)
        assert done.returncode == ends, done.stdout + done.stderr
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def host(tmp_path: Path) -> Recorded:
    tools = "bash env date nproc sed sort grep wc head sleep cat dirname hostname"
    for tool in tools.split():
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    return Recorded(tmp_path)


@pytest.mark.parametrize(
    ("environment", "options", "planned"),
    [
        ({}, [], "--gpus 2 --gpus-per-node 1 configs/demo.yaml"),
        ({"NPROC": "4"}, [], "configs/demo.yaml"),
        ({"SBATCH_GPUS_PER_NODE": "h100:8"}, [], "--gpus 16 --gpus-per-node 8 configs/demo.yaml"),
        ({}, ["--gpus=8"], "--gpus 2 --gpus-per-node 1 configs/demo.yaml --gpus=8"),
    ],
)
def test_a_dry_run_plans_for_what_sbatch_would_request(host: Recorded, environment, options, planned):
    host.program("sbatch")
    host.program("python")
    (call,) = host.run("cpt_korean.sh", "configs/demo.yaml", "--dry-run", *options, **environment)
    assert call == f"python -m pipeline.train --dry-run {planned}"


def test_the_first_stage_knows_how_many_ranks_will_divide_the_batch(host: Recorded):
    host.program("python", "exit 1")
    assert host.run("cpt_korean.sh", "configs/demo.yaml", NPROC="3", ends=1)[0].startswith("python -m pipeline clean ")
    assert host.environment_of("python")["EXPECTED_WORLD_SIZE"] == "3"


def test_changes_of_settings_reach_every_stage(host: Recorded):
    host.program("python")
    changes = ("configs/demo.yaml", "--set", "name=two words", "--set=seed=7")
    calls = host.run("cpt_korean.sh", *changes, NPROC="2")
    assert len(calls) == 8
    assert all(call.endswith(" --set=name=two words --set=seed=7") for call in calls)
    planned = host.run("cpt_korean.sh", *changes, "--dry-run", "--json", NPROC="2")[-1]
    assert (
        planned.startswith("python -m pipeline.train --dry-run configs/demo.yaml") and "--set=seed=7 --json" in planned
    )


IN_IMAGE = '[[ $1 != exec ]] || exec env IN_IMAGE=yes "${@:3}"'


def test_a_container_needs_no_python_on_the_host(host: Recorded):
    """The image's python runs, with this checkout's code."""
    host.program("apptainer", f"PATH={host.folder}/image:$PATH; {IN_IMAGE}")
    (host.folder / "image").mkdir()
    Recorded(host.folder / "image").program("python")
    calls = host.run("cpt_korean.sh", "configs/demo.yaml", CONTAINER="apptainer exec image.sif", NPROC="2")
    assert [call.split()[:4] for call in calls] == [["apptainer", "exec", "image.sif", "python"]] * 8
    environment = Recorded(host.folder / "image").environment_of("python")
    assert (environment["IN_IMAGE"], environment["PYTHONPATH"]) == ("yes", str(PROJECT))
    absent = bash(PROJECT / "slurm" / "cpt_korean.sh", CONTAINER="docker-of-nobody run image")
    assert (absent.returncode, absent.stderr.count("\n")) == (1, 1) and "no docker-of-nobody on PATH" in absent.stderr


@pytest.mark.parametrize("launcher", ["srun --mpi=pmix", "mpirun -n 4"])
def test_mpi_starts_the_images_python_with_the_hosts_launcher(host: Recorded, launcher: str):
    host.program(launcher.split()[0])
    host.program("apptainer")
    options = {"MPI": "1", "CONTAINER": "apptainer exec image.sif"}
    if "srun" not in launcher:
        options["MPI_LAUNCHER"] = launcher
    call, *_ = host.run("tokenize_korean.sh", "configs/demo.yaml", **options)
    assert call.startswith(f"{launcher} apptainer exec image.sif python -m pipeline tokenize ")
    assert call.endswith(" --mpi")


@pytest.mark.parametrize(
    ("tasks", "step", "shares"),
    [
        ((0, 1, 2), 1, ["0/3", "1/3", "2/3"]),
        ((10, 20, 30), 10, ["0/3", "1/3", "2/3"]),
        ((2, 5), 1, ["0/2", "1/2"]),
        ((1, 2, 7, 9), 1, ["0/4", "1/4", "2/4", "0/4"]),
    ],
)
def test_every_task_of_an_array_gets_a_share_below_their_number(host: Recorded, tasks, step, shares):
    host.program("python")
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_MIN": str(min(tasks)), "SLURM_ARRAY_TASK_STEP": str(step)}
    for task in tasks:
        array |= {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": str(len(tasks))}
        calls = host.run("tokenize_korean.sh", "configs/demo.yaml", **array)
    assert [call.split("--share ")[1] for call in calls] == shares


def test_the_jobs_of_a_study_do_not_inherit_their_submitters_allocation(host: Recorded):
    """srun would take these variables for its own options."""
    host.program("python", r"printf 'fft\tconfigs/demo.yaml\ttrain\n'")
    host.program("sbatch", "echo 12")
    host.program("scontrol")
    driver = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "1000", "SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "1"}
    calls = host.run("run_study.sh", "configs/studies/korean.yaml", **driver, SLURM_CONF="/etc/slurm.conf", DATA="x")
    assert [call.partition(" ")[0] for call in calls].count("sbatch") == 2
    passed_on = {name: value for name, value in host.environment_of("sbatch").items() if name.startswith("SLURM_")}
    assert passed_on == {"SLURM_CONF": "/etc/slurm.conf"}
    assert host.environment_of("sbatch")["DATA"] == "x"


def test_ranks_see_the_gpus_of_their_node_and_wait_for_a_trackers_end(host: Recorded):
    """Also where the job was submitted with --gpus-per-task, which srun would bind; W&B takes up to a minute."""
    host.program("srun")
    host.program("python")
    host.program(
        "scontrol",
        'case "$*" in *hostnames*) echo n1 ;; *) echo "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1 x" ;; esac',
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "8"}
    calls = host.run("cpt_korean.sh", "configs/demo.yaml", "train", **job, SLURM_GPUS_PER_TASK="1")
    (call,) = (call.split() for call in calls if call.startswith("srun "))
    (wait,) = (int(option.partition("=")[2]) for option in call if option.startswith("--wait="))
    assert "--gpu-bind=none" in call and wait > trackers._FINISH_TIMEOUT_S
