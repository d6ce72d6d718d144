"""An environment that has torch, transformers, what those two require, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def clean_environment(folder: Path) -> Path:
    """Links the packages into `folder`, from which `run_in` starts a Python without any other site-packages."""
    folder.mkdir()
    for package in _closure(["torch", "transformers"]):
        roots = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for root in roots:
            source = Path(str(package.locate_file(root)))
            if source.exists() and not (folder / root).exists():
                (folder / root).symlink_to(source)
    return folder


def run_in(folder: Path, code: str, *arguments: str, home: Path) -> str:
    """What `code` prints there."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments], env=environment, cwd=home.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _closure(names: list[str]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    while names:
        name = names.pop().lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform
        required = (line for line in found[name].requires or [] if "extra ==" not in line)
        names += [match[0] for line in required if (match := re.match(r"[A-Za-z0-9._-]+", line))]
    return list(found.values())
