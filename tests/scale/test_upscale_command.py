"""`tools/upscale.py` as a user runs it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.scale.expansion import MANIFEST, open_expansion
from tests.bases import STORIES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    """Writes a run's YAML file, with some of its settings changed, and gives its path."""

    def write(**changes):
        values = {
            "name": "test",
            "folder": str(tmp_path / "run"),
            "base": str(STORIES),
            "method": {
                "name": "scale",
                "variant": "preserve",
                "expansion": {"hidden_size": 16, "intermediate_size": 44, "num_attention_heads": 2},
            },
            "data": {
                "folder": str(tmp_path / "tokens"),
                "sequence_length": 64,
                "corpora": {"korean": {"input": ["unread.jsonl"]}},
            },
            "schedule": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "learning_rate": 1e-3},
            "deepspeed": "ds_configs/unread.json",
            **changes,
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs the tool in this process, which has imported everything already; returns its code and its messages."""

    def run(config):
        monkeypatch.setattr(sys, "argv", ["upscale.py", str(config)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "tools" / "upscale.py"), run_name="__main__")
        return end.value.code or 0, capsys.readouterr().err

    return run


def test_the_first_run_writes_and_the_second_skips(config, tmp_path, run_here):
    code, output = run_here(config())
    assert code == 0, output
    assert "wrote the initial expansion to" in output.splitlines()[-1]
    manifest = tmp_path / "run" / "upscaled" / MANIFEST
    assert "embedding.expansion.weight" in open_expansion(manifest.parent).names
    written = manifest.stat().st_mtime_ns
    code, output = run_here(config())
    assert code == 0
    assert "is there already" in output
    code, output = run_here(config(seed=99))
    assert code == 1
    assert "made with another seed" in output
    assert manifest.stat().st_mtime_ns == written
    weights = manifest.parent / "expansion-00001.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, output = run_here(config())
    assert code == 1
    assert "expansion-00001.safetensors: damaged" in output


def test_a_missing_expansion_to_continue_from_is_refused(config, tmp_path, run_here):
    code, output = run_here(config(upscaled=str(tmp_path / "elsewhere")))
    assert code == 2
    assert "elsewhere: holds no expansion; convert the run to train on with --format expansion" in output
    assert not (tmp_path / "elsewhere").exists()


METHOD_OF_THREE_HEADS = {
    "name": "scale",
    "variant": "preserve",
    "expansion": {"hidden_size": 16, "intermediate_size": 44, "num_attention_heads": 3},
}
FAULTS = {
    "no base": ({"base": "/nowhere"}, 1, "error: /nowhere/config.json: no such file"),
    "heads": ({"method": METHOD_OF_THREE_HEADS}, 2, "error: method.expansion.num_attention_heads: 3"),
    "unknown key": ({"lerning_rate": 1}, 2, "lerning_rate: unknown key"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_users_fault_is_one_line_and_leaves_nothing(config, tmp_path, run_here, fault):
    changes, expected, message = FAULTS[fault]
    code, output = run_here(config(**changes))
    assert code == expected
    assert message in output
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "run").exists()
