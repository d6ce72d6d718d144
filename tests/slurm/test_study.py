"""`slurm/run_study.sh`: every run a job, and the driver after them; the same without Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PROJECT
from tests.study.studies import study_values, write_study

SCRIPT = PROJECT / "slurm" / "run_study.sh"


@pytest.mark.slurm
def test_a_study_is_a_chain_of_jobs(slurm_cluster: Cluster, tokens: Path, tmp_path: Path):
    values = study_values(tmp_path, tokens)
    values["methods"] = {"fft": {"label": "FFT", "method": {"name": "fft"}, "learning_rates": [1e-3]}}
    study = write_study(tmp_path, {**values, "seeds": [1], "match": None})
    environment = {
        "STUDY": str(study),
        "RUN_SBATCH_OPTIONS": f"--nodes=1 --output={tmp_path}/%j.out",
        "SBATCH_OUTPUT": f"{tmp_path}/%j.out",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    driver = slurm_cluster.sbatch(SCRIPT, env=environment, cwd=PROJECT)
    assert slurm_cluster.wait(driver).state == "COMPLETED", slurm_cluster.output(driver)
    said = slurm_cluster.output(driver)
    run, last = map(int, re.findall(r"job (\d+)(?:: train of| goes on after)", said))
    assert slurm_cluster.job(run)["JobName"] == "fft.lr_0.001.seed_1"
    assert slurm_cluster.wait(last).state == "COMPLETED", slurm_cluster.output(last)
    assert slurm_cluster.job(run)["JobState"] == "COMPLETED"
    (row,) = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert (row["method"], row["folder"]) == ("fft", "fft.lr_0.001.seed_1")
    assert "chosen" in slurm_cluster.output(last)


def test_a_study_that_is_not_there_ends_in_one_line():
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    result = subprocess.run(
        ["bash", str(SCRIPT)], env={**clean, "STUDY": "nowhere.yaml"}, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error: STUDY=nowhere.yaml: no such file")
