"""docs/tutorial.md, command by command as it is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ON_THE_CPU, PROJECT

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def test_the_tutorial_ends_with_a_model_on_one_machine_and_on_a_cluster(
    slurm_cluster: Cluster, tmp_path: Path
):
    folder = tmp_path / "work"
    subprocess.run([sys.executable, "-m", "pipeline", "new", str(folder)], cwd=PROJECT, check=True)
    (folder / ".venv").symlink_to(PROJECT / ".venv")
    page = (PROJECT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```$", page)
    assert len(blocks) >= 8
    script = tmp_path / "tutorial.sh"
    script.write_text("set -euo pipefail\n" + "\n".join(blocks), encoding="utf-8")

    printed = slurm_cluster.run(
        "bash", str(script), cwd=folder, PYTHONPATH=str(PROJECT), **ON_THE_CPU
    )

    here = json.loads((folder / "runs" / "my-korean" / "summary.json").read_text(encoding="utf-8"))
    before, after = here["scores"]["before"], here["scores"]["after"]
    assert after["new"]["perplexity"] < before["new"]["perplexity"]
    assert after["old"]["perplexity"] < 1.2 * before["old"]["perplexity"]
    assert here["closed_max_abs_logit_difference"] in (0.0, None)
    assert 0 <= here["gate_open"]["old"] < 0.5 < here["gate_open"]["new"] <= 1
    assert "Once upon a time" in printed
    report = folder / "my-korean.html"
    subprocess.run(
        [sys.executable, "-m", "studies", "report", folder / "runs/my-korean", "--output", report],
        cwd=PROJECT,
        check=True,
    )
    assert "my-korean" in report.read_text(encoding="utf-8")
    job = int(re.search(r"Submitted batch job (\d+)", printed)[1])
    end = slurm_cluster.wait(job)
    assert end.state == "COMPLETED", slurm_cluster.evidence(job)
    there = json.loads(
        (folder / "runs" / "on-the-cluster" / "summary.json").read_text(encoding="utf-8")
    )["scores"]
    assert there["after"]["new"]["perplexity"] == pytest.approx(
        after["new"]["perplexity"], rel=1e-4
    )
