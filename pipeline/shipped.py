"""The files that come with the package: programs, configurations, batch scripts, and the demo's model and texts."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("configs", "ds_configs", "slurm", "tools", "data")


def shipped() -> Path:
    """The folder of these files: inside an installed package, where setup.py copies them, or else the checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent
