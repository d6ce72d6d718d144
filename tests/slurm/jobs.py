"""Batch scripts for the tests of this folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

from tests.slurm.cluster import Cluster

PROJECT = Path(__file__).parents[2]
ON_THE_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def stage_script(folder: Path, body: str, *options: str) -> Path:
    """A script with an #SBATCH line for each option; its body uses functions of common.sh."""
    path = folder / "job.sh"
    head = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in options),
        "set -euo pipefail",
    ]
    path.write_text(
        "\n".join([*head, f"cd {PROJECT}", "source slurm/common.sh", "load_site", body, ""])
    )
    return path


def submit(cluster: Cluster, folder: Path, body: str, *options: str, **env: str) -> int:
    """Submits such a script, of a run in `folder`, from there; returns the job's id."""
    return cluster.sbatch(
        stage_script(folder, body, *options),
        cwd=folder,
        **{"CONFIG": str(run_config(folder)), **env},
    )


def run_config(folder: Path, run: Path | None = None) -> Path:
    """The demo's configuration, with its run in `run`, by default `folder/run`."""
    values = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    path = folder / "config.yaml"
    path.write_text(
        yaml.safe_dump({**values, "folder": str(run or folder / "run")}), encoding="utf-8"
    )
    return path


def without_slurm(**env: str) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
    } | env


BASH = ("/usr/bin/env", "--default-signal", "bash")
"""Tests in the background of a script inherit that INT and QUIT are ignored, for which bash would
set no trap."""


def bash(script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user without Slurm would."""
    command = [*BASH, str(script), *arguments]
    return subprocess.run(
        command, env=without_slurm(**env), capture_output=True, text=True, check=False
    )
