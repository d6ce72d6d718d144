"""The batch scripts as files: what Slurm, or a shell without it, makes of them before any stage runs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PROJECT

BATCH_SCRIPTS = sorted(
    path for path in (PROJECT / "slurm").glob("*.sh") if "#SBATCH" in path.read_text(encoding="utf-8")
)


def by_name(path: Path) -> str:
    return path.name


def test_the_run_has_its_batch_scripts():
    assert {"cpt_korean.sh", "convert_checkpoint.sh", "evaluate.sh"} <= {path.name for path in BATCH_SCRIPTS}


@pytest.mark.parametrize("script", BATCH_SCRIPTS, ids=by_name)
def test_no_sbatch_line_hopes_for_a_shell_to_expand_it(script: Path):
    options = re.findall(r"^#SBATCH (.*)$", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert options
    assert not [option for option in options if re.search(r"[$`]", option)]


@pytest.mark.slurm
@pytest.mark.parametrize("script", BATCH_SCRIPTS, ids=by_name)
def test_slurm_would_take_every_script(slurm_cluster: Cluster, script: Path):
    slurm_cluster.run("sbatch", "--test-only", str(script), cwd=PROJECT)


@pytest.mark.slurm
def test_outside_the_project_a_job_says_where_to_submit(slurm_cluster: Cluster, tmp_path: Path):
    job = slurm_cluster.sbatch(PROJECT / "slurm" / "cpt_korean.sh", cwd=tmp_path)
    end = slurm_cluster.wait(job)
    assert (end.state, end.exit_code) == ("FAILED", 2)
    assert "error: call sbatch in the project's root, or set PROJECT" in slurm_cluster.output(job)


@pytest.mark.slurm
def test_a_failed_job_takes_the_rest_of_its_chain_along(slurm_cluster: Cluster, tmp_path: Path):
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
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {complaint}")
    assert result.stderr.count("\n") == 1
