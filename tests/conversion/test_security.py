"""A malicious checkpoint: nothing in it runs, and nothing is written outside the output folder."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.trained_model import open_trained
from pipeline.conversion.verify import probe_maker
from pipeline.errors import CheckpointError
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, save_many, scale, zero
from tests.data.helpers import run_main
from tests.distributed import run_ranks


class Bomb:
    """Creates the file `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_many, 2, [(STORIES, scale("adapt"), folder / str(stage), 1, zero(stage)) for stage in (2, 3)])
    return lambda stage: checkpoint_in(folder / str(stage))


@pytest.fixture(params=[2, 3], ids=["ZeRO-2", "ZeRO-3"])
def checkpoint(request, checkpoints):
    return checkpoints(request.param)


def refused(file: Path, match: str | None = None):
    """Expects a CheckpointError, unless it is a file that conversion does not read: another ZeRO-3 rank's model."""
    unread = file.name == "zero_pp_rank_1_mp_rank_00_model_states.pt"
    return contextlib.nullcontext() if unread else pytest.raises(CheckpointError, match=match)


def test_a_pickle_bomb_in_any_file_is_not_executed(checkpoint, tmp_path):
    copied, mark = shutil.copytree(checkpoint, tmp_path / "copy"), tmp_path / "mark"
    files = sorted(copied.glob("*_states.pt"))
    assert len(files) >= 3
    for file in files:
        content = file.read_bytes()
        good = torch.load(file, weights_only=False)
        for planted in ({**good, "extra": Bomb(mark)}, Bomb(mark)):
            torch.save(planted, file)
            # Without our reader the code runs:
            torch.load(file, weights_only=False)
            assert mark.exists()
            mark.unlink()
            with refused(file, match="nothing in it was run") as error:
                open_trained(copied, STORIES)
            assert not mark.exists()
            assert error is None or (str(file) in str(error.value) and "\n" not in str(error.value))
        file.write_bytes(pickle.dumps(Bomb(mark)))
        with refused(file):
            open_trained(copied, STORIES)
        assert not mark.exists()
        file.write_bytes(content)
    open_trained(copied, STORIES)


def test_the_command_line_reports_it_in_one_line(checkpoint, tmp_path):
    copied, mark = shutil.copytree(checkpoint, tmp_path / "copy"), tmp_path / "mark"
    file = min(copied.glob("*optim_states.pt"))
    torch.save({"optimizer_state_dict": Bomb(mark)}, file)
    options = ["--checkpoint", copied, "--base", STORIES, "--output", tmp_path / "out"]
    done = run_main("convert_checkpoint.py", *options)
    assert done.returncode == 1 and not mark.exists()
    assert done.stderr.startswith(f"error: {file}: names posix.system") and done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_names_do_not_lead_outside(checkpoint, tmp_path):
    copied = shutil.copytree(checkpoint, tmp_path / "copy")
    for file in copied.glob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        state["param_shapes"][0]["../../escape"] = torch.Size([0])
        torch.save(state, file)
    with pytest.raises(CheckpointError):
        open_trained(copied, STORIES)
    copied = shutil.copytree(checkpoint, tmp_path / "another")
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["files"]["../../etc/passwd"] = {"bytes": 1, "sha256": "0"}
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside"):
        convert(Conversion(copied, STORIES, tmp_path / "out"), probe_maker({}))
    assert not (tmp_path / "out").exists()


def test_only_known_files_are_copied_from_the_base(checkpoint, tmp_path):
    base = shutil.copytree(STORIES, tmp_path / "base")
    (base / "modeling_evil.py").write_text("raise SystemExit('run')")
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (base / "config.json").write_text(json.dumps(config))
    output = tmp_path / "out"
    convert(Conversion(checkpoint, base, output, format="scale"), probe_maker({}))
    assert "modeling_evil.py" not in {path.name for path in output.iterdir()}
    assert "evil" not in (output / "config.json").read_text()
