"""`scale-cpt upscale` as a user runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.scale.expansion import MANIFEST, open_expansion
from tests.training.runs import write_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs the tool in this process, which has imported everything already; returns its code and its messages."""

    def run(config):
        monkeypatch.setattr(sys, "argv", ["scale-cpt", "upscale", str(config)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, capsys.readouterr().err

    return run


def test_the_first_run_writes_and_the_second_skips(tmp_path, run_here):
    code, output = run_here(write_config(tmp_path / "run", tmp_path))
    assert code == 0, output
    assert "wrote the initial expansion to" in output.splitlines()[-1]
    manifest = tmp_path / "run" / "upscaled" / MANIFEST
    assert "embedding.expansion.weight" in open_expansion(manifest.parent).names
    written = manifest.stat().st_mtime_ns
    code, output = run_here(write_config(tmp_path / "run", tmp_path))
    assert code == 0
    assert "is there already" in output
    code, output = run_here(write_config(tmp_path / "run", tmp_path, seed=99))
    assert code == 1
    assert "made with another seed" in output
    assert manifest.stat().st_mtime_ns == written
    weights = manifest.parent / "expansion-00001.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, output = run_here(write_config(tmp_path / "run", tmp_path))
    assert code == 1
    assert "expansion-00001.safetensors: damaged" in output


def test_a_missing_expansion_to_continue_from_is_refused(tmp_path, run_here):
    code, output = run_here(write_config(tmp_path, tmp_path, upscaled=str(tmp_path / "elsewhere")))
    assert code == 2
    assert "elsewhere: holds no expansion; convert the run to train on with --format expansion" in output
    assert not (tmp_path / "elsewhere").exists()
