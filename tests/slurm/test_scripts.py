"""The batch scripts, with Slurm and without, before any stage runs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PROJECT, bash, script

BATCH_SCRIPTS = sorted(
    path for path in (PROJECT / "slurm").glob("*.sh") if "\n#SBATCH" in path.read_text(encoding="utf-8")
)


def by_name(path: Path) -> str:
    return path.name


def test_the_run_has_its_batch_scripts():
    assert {"cpt_korean.sh", "convert_checkpoint.sh", "evaluate.sh"} <= {path.name for path in BATCH_SCRIPTS}


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=by_name)
def test_sbatch_lines_have_no_shell_variables(path: Path):
    options = re.findall(r"^#SBATCH (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert options
    assert not [option for option in options if re.search(r"[$`]", option)]


@pytest.mark.slurm
@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=by_name)
def test_slurm_accepts_every_script(slurm_cluster: Cluster, path: Path):
    slurm_cluster.run("sbatch", "--test-only", str(path), cwd=PROJECT)


@pytest.mark.slurm
def test_outside_the_project_a_job_says_where_to_submit(slurm_cluster: Cluster, tmp_path: Path):
    job = slurm_cluster.sbatch(PROJECT / "slurm" / "cpt_korean.sh", cwd=tmp_path)
    end = slurm_cluster.wait(job)
    assert (end.state, end.exit_code) == ("FAILED", 2)
    assert "error: call sbatch in the project's root, or set PROJECT" in slurm_cluster.output(job)


@pytest.mark.slurm
def test_arguments_reach_a_job_without_the_submitters_environment(slurm_cluster: Cluster, tmp_path: Path):
    """A job that Slurm will not requeue also says so."""
    shell = ("--export=PATH,VENV,SLURM_CONF", "--no-requeue", f"--output={tmp_path}/%j.out")
    command = ("slurm/cpt_korean.sh", "configs/demo.yaml", "fly")
    job = int(slurm_cluster.run("sbatch", "--parsable", *shell, *command, env={"CONFIG": "lost"}, cwd=PROJECT))
    assert slurm_cluster.wait(job).state == "FAILED", slurm_cluster.evidence(job)
    output = slurm_cluster.output(job)
    assert "run configs/demo.yaml in " in output
    assert 'error: STAGES: there is no stage "fly"' in output
    assert "Slurm will not queue this job again (Requeue=0)" in output


def test_modules_that_use_unset_variables_are_loaded(tmp_path: Path):
    module = 'module() { echo "$1 ${@:2}$NOT_SET"; }'
    result = bash(script(tmp_path, f"{module}\ncd {PROJECT}\nsource slurm/common.sh\nload_site"), MODULES="cuda gcc/13")
    assert (result.returncode, result.stdout) == (0, "load cuda gcc/13\n"), result.stderr


@pytest.mark.parametrize("name", ["convert_checkpoint", "evaluate"])
def test_a_stages_own_script_takes_the_run_as_its_argument(tmp_path: Path, name: str):
    config = tmp_path / "broken.yaml"
    config.write_text("name: broken\n", encoding="utf-8")
    result = bash(PROJECT / "slurm" / f"{name}.sh", str(config))
    assert result.returncode == 2
    assert f"error: stage {name.split('_')[0]} ended with exit code 2" in result.stderr


@pytest.mark.slurm
def test_a_failed_job_cancels_the_rest_of_its_chain(slurm_cluster: Cluster, tmp_path: Path):
    config = tmp_path / "broken.yaml"
    config.write_text("name: broken\n", encoding="utf-8")
    output = f"--output={tmp_path}/%x.out"
    submitted = slurm_cluster.run(
        "bash",
        str(PROJECT / "slurm" / "submit_pipeline.sh"),
        output,
        env={"CONFIG": str(config), "SERIAL_SBATCH_OPTIONS": output},
    )
    assert re.findall(r"^(\w+): job", submitted, flags=re.MULTILINE) == [
        "tokenization",
        "training",
        "conversion",
        "evaluation",
    ]
    first, *rest = map(int, re.findall(r": job (\d+)", submitted))
    assert slurm_cluster.wait(first).state == "FAILED"
    assert "error: " in slurm_cluster.output(first)
    assert [slurm_cluster.wait(job).state for job in rest] == ["CANCELLED"] * 3


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"CONFIG": "configs/nowhere.yaml"}, "CONFIG=configs/nowhere.yaml: no such file"),
        ({"CONFIG": "pyproject.toml", "STAGES": "fly"}, 'STAGES: there is no stage "fly"'),
    ],
    ids=["config", "stage"],
)
def test_a_mistake_on_the_command_line_ends_in_one_line(environment: dict[str, str], complaint: str):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    result = subprocess.run(
        ["bash", str(PROJECT / "slurm" / "cpt_korean.sh")],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {complaint}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("environment", "options", "layout"),
    [
        ({}, [], "2 GPUs on 2 node(s)"),
        ({"NPROC": "4"}, [], "4 CPU processes on 1 node(s)"),
        ({"SBATCH_GPUS_PER_NODE": "h100:8"}, [], "16 GPUs on 2 node(s)"),
        ({}, ["--gpus=8", "--gpus-per-node=4"], "8 GPUs on 2 node(s)"),
    ],
    ids=["as the script says", "this machine", "the site's GPUs", "as asked"],
)
def test_a_dry_run_plans_for_what_sbatch_would_request(
    environment: dict[str, str], options: list[str], layout: str, tmp_path: Path
):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    sbatch = tmp_path / "sbatch"  # the machine of the test may have no Slurm
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    clean["PATH"] = f"{tmp_path}:{clean['PATH']}"
    result = subprocess.run(
        ["bash", str(PROJECT / "slurm" / "cpt_korean.sh"), "--dry-run", *options],
        env={**clean, "CONFIG": "configs/demo.yaml", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert layout in result.stdout, result.stderr


def test_a_batch_that_the_ranks_cannot_divide_is_refused_before_tokenization(tmp_path: Path):
    values = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    values |= {"folder": str(tmp_path / "run"), "data": {**values["data"], "folder": str(tmp_path / "tokens")}}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    result = subprocess.run(
        ["bash", str(PROJECT / "slurm" / "cpt_korean.sh")],
        env={**clean, "CONFIG": str(config), "NPROC": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "global_batch_size" in result.stderr.splitlines()[0]
    assert not (tmp_path / "tokens").exists()


def test_changes_of_settings_reach_every_stage(tmp_path: Path):
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$PYTHONPATH|$@" >> {tmp_path}/calls\n')
    (tmp_path / "python").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTHON"))}
    environment = {**clean, "PATH": f"{tmp_path}:{clean['PATH']}", "VENV": str(tmp_path), "NPROC": "2"}
    # `env` stands for a container's command.
    command = [
        "bash",
        PROJECT / "slurm" / "cpt_korean.sh",
        "configs/demo.yaml",
        "--set",
        "name=two words",
        "--set=seed=7",
    ]
    subprocess.run(command, env={**environment, "CONTAINER": "env"}, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 7
    assert all(call.endswith(" --set=name=two words --set=seed=7") for call in calls)
    assert all(call.startswith(f"{PROJECT}|") for call in calls), "an image's code would run instead of the checkout's"
    subprocess.run([*command, "--dry-run", "--json"], env=environment, check=True, capture_output=True)
    planned = (tmp_path / "calls").read_text().splitlines()[-1]
    assert planned.startswith("|-m pipeline.train --dry-run configs/demo.yaml") and "--set=seed=7 --json" in planned
    lost = subprocess.run([*command, "--set"], env=environment, capture_output=True, text=True)
    assert (lost.returncode, lost.stderr) == (1, "error: --set: expected KEY=VALUE after it\n")
