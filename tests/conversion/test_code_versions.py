"""Exports whose code differs, in one process: each runs its own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.hf.remote_code.modeling_scale_combined import CombinedForCausalLM
from pipeline.hf.write import code_files, copy_code, write_hf_folder
from tests.conversion.checkpoints import without_this_project
from tests.conversion.exports import choose_export

LOADED = """
import torch
from transformers import AutoModelForCausalLM
tokens = torch.arange(1, 9).unsqueeze(0)
for folder in sys.argv[1].split(","):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    print(float(model(tokens).logits.abs().sum()))
"""


def other_code(code: list[Path], folder: Path) -> list[Path]:
    """The files of another version, whose logits are twice as large."""
    folder.mkdir()
    changed = [Path(shutil.copy(file, folder)) for file in code]
    [file] = [file for file in changed if file.name == "scale_streams.py"]
    text = file.read_text()
    assert text.count("        return z\n") == 1
    file.write_text(text.replace("        return z\n", "        return 2 * z\n"))
    return changed


def test_each_folder_runs_its_own_code_in_either_order(models, tmp_path):
    """transformers keys a model's class by its configuration file, and copies of both folders by
    their name."""
    model = models("llama tied", "adapt")
    export = choose_export(model, "scale", model.base.dtype)
    versions = {"first": export.code, "second": other_code([*export.code], tmp_path / "code")}
    folders = []
    for name, code in versions.items():
        folder = tmp_path / name / "hf"
        folder.mkdir(parents=True)
        write_hf_folder(folder, replace(export, code=code), model.base.path)
        folders.append(str(folder))

    def sums(order: list[str]) -> list[float]:
        home = tmp_path / f"from_{Path(order[0]).parent.name}"
        home.mkdir()
        done = without_this_project(LOADED, Path(",".join(order)), home)
        return [float(line) for line in done.stdout.split()]

    first, second = sums(folders)
    assert second == pytest.approx(2 * first)
    assert sums(folders[::-1]) == [second, first]


def test_the_hash_is_of_every_file_of_code(tmp_path):
    """Of a combination too, which imports the same configuration file."""
    code = code_files(CombinedForCausalLM)
    written = []
    for version, files in enumerate([code, code, other_code(code, tmp_path / "code")]):
        folder = tmp_path / str(version)
        folder.mkdir()
        copy_code(folder, files)
        assert {file.name for file in folder.iterdir()} == {file.name for file in code}
        written.append((folder / "configuration_scale.py").read_text())
    assert written[0] == written[1] != written[2]
