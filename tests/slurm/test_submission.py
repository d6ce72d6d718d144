"""The batch scripts as they are submitted to a real Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.extensions.cleaning.clean import clean
from pipeline.extensions.cleaning.stages import cleaning_jobs
from tests.data.helpers import contents, stories
from tests.extensions.cleaning.test_clean import run_of
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PROJECT

pytestmark = [pytest.mark.slurm, pytest.mark.full]

SLURM = PROJECT / "slurm"
BATCH_SCRIPTS = [
    path.name
    for path in sorted(SLURM.glob("*.sh"))
    if "\n#SBATCH" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", BATCH_SCRIPTS)
def test_slurm_accepts_every_script(slurm_cluster: Cluster, name: str):
    slurm_cluster.run("sbatch", "--test-only", str(SLURM / name), cwd=PROJECT)
    options = re.findall(
        r"^#SBATCH (.*)$", (SLURM / name).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert not re.search(r"[$`]", "".join(options)), "shell variables are not expanded there"


def test_outside_the_project_a_job_says_where_to_submit(slurm_cluster: Cluster, tmp_path: Path):
    job = slurm_cluster.sbatch(SLURM / "cpt_korean.sh", cwd=tmp_path)
    assert slurm_cluster.wait(job) == ("FAILED", 2, 0)
    assert "error: call sbatch in the project's root, or set PROJECT" in slurm_cluster.output(job)


def test_arguments_reach_a_job_without_the_submitters_environment(
    slurm_cluster: Cluster, tmp_path: Path
):
    """A job that Slurm will not requeue also says so."""
    shell = ("--export=PATH,VENV,SLURM_CONF", "--no-requeue", f"--output={tmp_path}/%j.out")
    command = ("slurm/cpt_korean.sh", "configs/demo.yaml", "fly")
    job = slurm_cluster.sbatch(*shell, *command, CONFIG="lost", cwd=PROJECT)
    assert slurm_cluster.wait(job).state == "FAILED", slurm_cluster.evidence(job)
    output = slurm_cluster.output(job)
    assert "run configs/demo.yaml in " in output
    assert 'error: STAGES: there is no stage "fly"' in output
    assert "Slurm will not queue this job again (Requeue=0)" in output


@pytest.mark.parametrize("first", ["cleaning", "tokenization"])
def test_a_failed_job_cancels_the_rest_of_its_chain(
    slurm_cluster: Cluster, tmp_path: Path, first: str
):
    """Cleaning is only there for corpora with that section."""
    config = run_of(tmp_path, ["text"], language="en")
    changes = ["--set=schedule.micro_batch_size=2"]
    changes += [] if first == "cleaning" else ["--set=data.corpora.crawl.clean=null"]
    output = f"--output={tmp_path}/%x.out"
    command = ["bash", str(SLURM / "submit_pipeline.sh"), *changes, output]
    submitted = slurm_cluster.run(*command, CONFIG=str(config), SERIAL_SBATCH_OPTIONS=output)
    names = ["cleaning", "tokenization", "training", "conversion", "evaluation"]
    assert re.findall(r"^(\w+): job", submitted, flags=re.MULTILINE) == names[names.index(first) :]
    job, *rest = map(int, re.findall(r": job (\d+)", submitted))
    assert slurm_cluster.wait(job).state == "FAILED"
    assert "error: " in slurm_cluster.output(job)
    assert {slurm_cluster.wait(job).state for job in rest} == {"CANCELLED"}


def test_cleaning_as_arrays_writes_what_one_machine_writes(slurm_cluster: Cluster, tmp_path: Path):
    texts = stories(40)[:40]
    alone, arrays = tmp_path / "alone", tmp_path / "arrays"
    for folder in (alone, arrays):
        folder.mkdir()
        run_of(folder, [*texts, *texts[:5]], language="en")
    (job,) = cleaning_jobs(load_config(alone / "run.yaml").data)
    clean(job, workers=1)
    script = ("slurm/clean_corpus.sh", arrays / "run.yaml")
    first = slurm_cluster.sbatch(f"--output={tmp_path}/%j.out", *script, cwd=PROJECT)
    assert slurm_cluster.wait(first).exit_code == 0, slurm_cluster.evidence(first)
    last = int(re.findall(r"continued by job (\d+)", slurm_cluster.output(first))[0])
    assert slurm_cluster.wait(last).exit_code == 0, slurm_cluster.evidence(last)
    by_one, by_many = (contents(folder / "tokens" / "crawl.clean") for folder in (alone, arrays))
    assert [*by_one] == [*by_many] and any(name.endswith(".zst") for name in by_one)
    assert all(by_one[name] == by_many[name] for name in by_one if name.endswith(".zst"))
    ended = slurm_cluster.run("squeue", "--noheader", "--states=all", "--format=%j %T")
    assert "clean-write COMPLETED" in ended  # the last job found that done
