"""The package as `pip install` gives it: built, installed alone, and used from an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from pipeline import __version__

pytestmark = pytest.mark.full

PROJECT = Path(__file__).parents[2]
SMALL = [
    "schedule.steps=2",
    "schedule.global_batch_size=2",
    "schedule.micro_batch_size=1",
    "data.sequence_length=64",
    "data.corpora.korean.input=examples/data/ko/reviews.heldout.jsonl.zst",
    "data.corpora.self_generated.sample.tokens=1000",
    "validation.max_sequences=2",
    "preflight.enabled=false",
    "gate=null",
    "method.open_rows=null",
    "method.open_gains=false",
    "method.low_rank=null",
]


def pip(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the source distribution of a copy of the project, as a build writes beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        listed, cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in filter(lambda name: (PROJECT / name).is_file(), names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, source / name, follow_symlinks=False)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist"],
        cwd=source,
        check=True,
        capture_output=True,
    )
    [packed_source] = (source / "dist").glob("*.tar.gz")
    pip(
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        packed_source,
    )
    return next(folder.glob("*.whl"))


def test_the_code_of_exports_has_a_copy_of_the_formulas(wheel):
    """In the checkout it is a link."""
    with zipfile.ZipFile(wheel) as archive:
        original = archive.read("pipeline/scale_math.py")
        assert original == (PROJECT / "pipeline" / "scale_math.py").read_bytes()
        assert archive.read("pipeline/hf/remote_code/scale_math.py") == original


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder `bin` of an environment with the wheel.

    Its dependencies are this environment's, through a .pth file. Such a file's folders are
    searched, but their own .pth files, which name the checkout, are not read.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip(
        "--python",
        folder / "bin" / "python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    )
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def run(installed):
    """Calls `scale-cpt` in a folder; returns what it prints."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def call(folder: Path, *arguments: object) -> str:
        command = [installed / "scale-cpt", *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stdout[-1000:], done.stderr[-3000:])
        return done.stdout

    return call


def test_the_wheel_holds_programs_settings_and_the_demos_texts(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "slurm/cpt_korean.sh",
        "slurm/convert_checkpoint.sh",
        "examples/data/models/stories260K/config.json",
    ):
        assert f"pipeline/shipped/{name}" in names
    assert "pipeline/commands/upscale.py" in names
    assert "pipeline/extensions/hosted/base_types.md" in names
    assert not [name for name in names if name.startswith("pipeline/shipped/tools")], (
        "no code twice"
    )
    assert not [
        name
        for name in names
        if name.startswith(("tests/", "tools/", "benchmarks/")) or ".pyc" in name
    ]
    assert wheel.stat().st_size < 8e6  # without the texts of studies


def test_a_run_from_text_to_an_exported_folder_outside_the_checkout(run, tmp_path):
    """In a folder that scale-cpt new makes; settings of DeepSpeed are found from any folder."""
    assert run(tmp_path, "--version") == f"scale-cpt {__version__}\n"
    run(tmp_path, "new", "work")
    work, begun = tmp_path / "work", "runs/demo"  # the run as it was started, with its changes
    run(
        work,
        "tokenize",
        "configs/demo.yaml",
        "--workers",
        1,
        *(f"--set={change}" for change in SMALL),
    )
    run(work, "sample", begun, "--workers", 1)
    run(work, "upscale", begun)
    run(work, "train", "--ranks", 2, begun)
    run(work, "convert", begun)
    assert json.loads((work / "runs/demo/training.json").read_text())["steps"] == 2
    assert (work / "runs/demo/hf/verification.json").exists()
    assert "step" in run(work, "status", begun)
    elsewhere = (
        (work / "configs/demo.yaml").read_text().replace("examples/data/", f"{work}/examples/data/")
    )
    (tmp_path / "run.yaml").write_text(elsewhere)
    plan = run(tmp_path, "train", "--dry-run", "--gpus", 2, "--gpu-memory-gib", 4, "run.yaml")
    assert "none found" in plan
