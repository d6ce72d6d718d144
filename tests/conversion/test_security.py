"""A malicious checkpoint or base: nothing in it runs, and nothing is written outside the output folder."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.verify import probe_maker
from pipeline.errors import CheckpointError
from tests.bases import STORIES
from tests.data.helpers import run_main


@pytest.fixture
def checkpoint(models, tmp_path):
    """A copy."""
    return shutil.copytree(models("stories260K", "adapt separate").checkpoint, tmp_path / "copy")


def test_a_damaged_file_is_reported_in_one_line(checkpoint, tmp_path):
    """How a file is read is tested in tests/checkpoint/test_rank_files.py."""
    file = checkpoint / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    done = run_main("convert_checkpoint.py", "--checkpoint", checkpoint, "--base", STORIES, "--output", tmp_path / "o")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {file}: missing or damaged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_names_do_not_lead_outside(checkpoint, tmp_path):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["../../etc/passwd"] = {"bytes": 1, "sha256": "0"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside"):
        convert(Conversion(checkpoint, STORIES, tmp_path / "out"), probe_maker({}))
    assert not (tmp_path / "out").exists()


def test_only_known_files_are_copied_from_the_base(checkpoint, tmp_path):
    base, output = shutil.copytree(STORIES, tmp_path / "base"), tmp_path / "out"
    (base / "modeling_evil.py").write_text("raise SystemExit('run')")
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (base / "config.json").write_text(json.dumps(config))
    convert(Conversion(checkpoint, base, output, format="scale"), probe_maker({}))
    assert "modeling_evil.py" not in {path.name for path in output.iterdir()}
    assert "evil" not in (output / "config.json").read_text()
