"""A malicious checkpoint or base: nothing in it runs, and nothing is written outside the output folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.trained_model import open_trained
from pipeline.conversion.verify import probe_maker
from pipeline.errors import CheckpointError
from tests.bases import STORIES
from tests.data.helpers import run_main


class Bomb:
    """Creates the file `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def checkpoint(models, tmp_path):
    """A copy."""
    return shutil.copytree(models("stories260K", "adapt separate").checkpoint, tmp_path / "copy")


def test_a_pickle_bomb_in_any_file_is_not_executed_and_reported_in_one_line(checkpoint, tmp_path):
    """How a file is read is tested in tests/checkpoint/test_torch_files.py."""
    mark, files = tmp_path / "mark", sorted(checkpoint.glob("*_states.pt"))
    assert len(files) >= 2
    for file in files:
        content = file.read_bytes()
        torch.save({**torch.load(file, weights_only=False), "extra": Bomb(mark)}, file)
        done = run_main(
            "convert_checkpoint.py", "--checkpoint", checkpoint, "--base", STORIES, "--output", tmp_path / "o"
        )
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"error: {file}: names posix.system") and "nothing in it was run" in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
        file.write_bytes(content)


def test_names_do_not_lead_outside(checkpoint, tmp_path):
    (file,) = checkpoint.glob("*model_states.pt")
    state = torch.load(file, weights_only=False)
    whole = file.read_bytes()
    state["param_shapes"][0]["../../escape"] = torch.Size([0])
    torch.save(state, file)
    with pytest.raises(CheckpointError):
        open_trained(checkpoint, STORIES)
    file.write_bytes(whole)
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
