"""The definitions of container images: both install the same files, in the same way."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]
SCRIPT = "bash /opt/scale-cpt/slurm/install_in_image.sh"


def test_both_definitions_are_the_same_image_of_the_files_that_setup_reads():
    dockerfile, apptainer, setup, ignored = (
        (PROJECT / name).read_text(encoding="utf-8")
        for name in ("Dockerfile", "slurm/scale-cpt.def", "setup.py", ".dockerignore")
    )
    [image] = re.findall(r"(?m)^FROM (\S+)$", dockerfile)
    assert f"From: {image}\n" in apptainer
    assert (
        f'RUN {SCRIPT} "$VARIANT"\n' in dockerfile
        and f'%post\n    {SCRIPT} "{{{{ VARIANT }}}}"\n' in apptainer
    )
    copied = re.findall(r"(?m)^    (\S+) /opt/scale-cpt/\1$", apptainer)
    assert all((PROJECT / name).exists() for name in copied)
    [shipped] = re.findall(r"SHIPPED = \[(.*)\]", setup)
    needed = {
        "setup.py",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "pipeline",
        "examples",
        *re.findall(r'"(\w+)"', shipped),
    }
    assert set(copied) == needed and not needed & set(ignored.split())
