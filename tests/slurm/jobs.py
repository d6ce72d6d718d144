"""Batch scripts for the tests of this folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

from tests.slurm.cluster import Cluster

PROJECT = Path(__file__).parents[2]
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
REQUEUED = (*TWO_NODES, "--requeue", "--open-mode=append")


def script(folder: Path, body: str, *options: str) -> Path:
    """Writes `folder/job.sh` with `body` and an #SBATCH line for each option."""
    path = folder / "job.sh"
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), "set -euo pipefail", body]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def stage_script(folder: Path, body: str, *options: str) -> Path:
    """The same for a body that uses the functions of slurm/common.sh, started as slurm/cpt_korean.sh starts."""
    return script(folder, f"cd {PROJECT}\nsource slurm/common.sh\nload_site\n{body}", *options)


def submit(cluster: Cluster, folder: Path, body: str, *options: str, **env: str) -> int:
    """Submits such a script, of a run in `folder`, from there; returns the job's id."""
    return cluster.sbatch(
        stage_script(folder, body, *options), env={"CONFIG": str(run_config(folder)), **env}, cwd=folder
    )


def run_config(folder: Path, run: Path | None = None) -> Path:
    """The demo's configuration, with its run in `run`, by default `folder/run`."""
    values = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**values, "folder": str(run or folder / "run")}), encoding="utf-8")
    return path


def bash(script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user without Slurm would."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, check=False)
