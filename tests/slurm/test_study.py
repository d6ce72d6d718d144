"""`studies/run_study.sh`: every run a job, and the driver after them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ON_THE_CPU, PROJECT
from tests.studies.studies import BEYOND, let_diverge, study_values, write_study

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def write_small(folder: Path, tokens: Path, *rates: float, **schedule: int) -> Path:
    """Full fine-tuning at these learning rates, with one seed."""
    values = study_values(folder, tokens)
    let_diverge(values)
    values["settings"]["schedule"].update(schedule)
    values["methods"] = {
        "fft": {"label": "FFT", "method": {"name": "fft"}, "learning_rates": list(rates)}
    }
    return write_study(folder, {**values, "seeds": [1]})


def submit(cluster: Cluster, study: Path, *options: str) -> list[int]:
    """Submits the driver, with sbatch's `options` for the runs.

    Returns the jobs of the runs and that of the next driver.
    """
    output = f"--output={study.parent}/%j.out"
    driver = cluster.sbatch(
        output,
        "studies/run_study.sh",
        cwd=PROJECT,
        STUDY=str(study),
        RUN_SBATCH_OPTIONS=" ".join(("--nodes=1", output, *options)),
        SERIAL_SBATCH_OPTIONS=f"--comment=serial {output}",
        **ON_THE_CPU,
    )
    assert cluster.wait(driver).state == "COMPLETED", cluster.output(driver)
    return [
        int(job)
        for job in re.findall(r"job (\d+)(?:: train of| continues after)", cluster.output(driver))
    ]


def error_of(cluster: Cluster, driver: int) -> str:
    """The one line with which a driver ended the chain."""
    assert cluster.wait(driver).state == "FAILED", cluster.output(driver)
    (error,) = (line for line in cluster.output(driver).splitlines() if line.startswith("error: "))
    assert "continues after" not in cluster.output(driver)
    return error


def test_a_study_is_a_chain_of_jobs_that_goes_on_past_a_rate_that_diverges(
    slurm_cluster: Cluster, tokens: Path, tmp_path: Path
):
    run, diverging, last = submit(slurm_cluster, write_small(tmp_path, tokens, 1e-3, BEYOND))
    assert slurm_cluster.job(run)["JobName"] == "fft.lr_0.001.seed_1"
    assert (
        slurm_cluster.job(last).get("Comment") == "serial" != slurm_cluster.job(run).get("Comment")
    )
    assert slurm_cluster.wait(last).state == "COMPLETED", slurm_cluster.output(last)
    assert [slurm_cluster.job(job)["JobState"] for job in (run, diverging)] == [
        "COMPLETED",
        "FAILED",
    ]
    row, diverged = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert (row["method"], row["folder"], row["chosen"]) == ("fft", "fft.lr_0.001.seed_1", True)
    assert (diverged["chosen"], diverged["after"]) == (False, {})


def test_the_chain_ends_where_a_run_fails_and_goes_on_when_it_is_submitted_again(
    slurm_cluster: Cluster, tokens: Path, tmp_path: Path
):
    study = write_small(tmp_path, tokens, 1e-3, global_batch_size=2)
    run, following = submit(slurm_cluster, study, "--ntasks-per-node=2")
    said = (
        "error: fft.lr_0.001.seed_1: not finished, though the jobs have ended; the first is "
        "failed: train: "
    )
    error = error_of(slurm_cluster, following)
    assert error.startswith(said) and "global_batch_size" in error
    assert slurm_cluster.job(run)["JobState"] == "FAILED"

    # Submitted by hand it tries again; a run that its user cancels ends the chain too.
    run, following = submit(slurm_cluster, study, "--hold")
    slurm_cluster.run("scancel", str(run))
    assert error_of(slurm_cluster, following).startswith(said)
