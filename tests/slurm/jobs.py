"""Batch scripts for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).parents[2]


def script(folder: Path, body: str, *options: str) -> Path:
    """Writes `folder/job.sh` with `body` and an #SBATCH line for each option."""
    path = folder / "job.sh"
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), "set -euo pipefail", body]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def stage_script(folder: Path, body: str, *options: str) -> Path:
    """The same for a body that uses the functions of slurm/common.sh, started as slurm/cpt_korean.sh starts."""
    return script(folder, f"cd {PROJECT}\nsource slurm/common.sh\nload_site\n{body}", *options)
