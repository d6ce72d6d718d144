"""The batch scripts as they are submitted to a real Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cleaning.test_clean import run_of
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PROJECT
from tests.slurm.test_scripts import BATCH_SCRIPTS, by_name

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=by_name)
def test_slurm_accepts_every_script(slurm_cluster: Cluster, path: Path):
    slurm_cluster.run("sbatch", "--test-only", str(path), cwd=PROJECT)


def test_outside_the_project_a_job_says_where_to_submit(slurm_cluster: Cluster, tmp_path: Path):
    job = slurm_cluster.sbatch(PROJECT / "slurm" / "cpt_korean.sh", cwd=tmp_path)
    end = slurm_cluster.wait(job)
    assert (end.state, end.exit_code) == ("FAILED", 2)
    assert "error: call sbatch in the project's root, or set PROJECT" in slurm_cluster.output(job)


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


@pytest.mark.parametrize("first", ["cleaning", "tokenization"])
def test_a_failed_job_cancels_the_rest_of_its_chain(slurm_cluster: Cluster, tmp_path: Path, first: str):
    """Cleaning is only there for corpora with that section."""
    config = run_of(tmp_path, ["text"], language="en")
    change = (
        "--set",
        "schedule.micro_batch_size=2",
        *(() if first == "cleaning" else ("--set", "data.corpora.crawl.clean=null")),
    )
    output = f"--output={tmp_path}/%x.out"
    submitted = slurm_cluster.run(
        "bash",
        str(PROJECT / "slurm" / "submit_pipeline.sh"),
        *change,
        output,
        env={"CONFIG": str(config), "SERIAL_SBATCH_OPTIONS": output},
    )
    names = ["cleaning", "tokenization", "training", "conversion", "evaluation"]
    expected = names[names.index(first) :]
    assert re.findall(r"^(\w+): job", submitted, flags=re.MULTILINE) == expected
    job, *rest = map(int, re.findall(r": job (\d+)", submitted))
    assert slurm_cluster.wait(job).state == "FAILED"
    assert "error: " in slurm_cluster.output(job)
    assert [slurm_cluster.wait(job).state for job in rest] == ["CANCELLED"] * len(rest)
