"""config.json of merged folders describes rotary embeddings for transformers 5, and for 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from pipeline.hf.base_files import base_config
from pipeline.model.from_hf import read_spec
from tests.bases import CONFIGS
from tests.conversion.exports import exported

THETA = 10_000.0
"""Transformers 4's, where config.json states none."""


def written(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    config = base_config(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_both_forms_say_the_same(name, tmp_path):
    """Transformers 5 reads the folder as before, and as one that has the older form alone."""
    values = CONFIGS[name].to_dict()
    config = written(tmp_path / "new", values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected = read_spec(tmp_path)
    assert read_spec(tmp_path / "new") == expected
    whole = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    assert config["rope_theta"] == whole["rope_theta"] and "rope_scaling" in config
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(older))
    if name != "olmo3":  # whose kinds of layers had one theta
        assert read_spec(tmp_path / "old") == expected
    if name not in ("olmo3", "llama partial"):  # whose part means nothing
        assert written(tmp_path / "again", older)["rope_parameters"] == config["rope_parameters"]


def test_what_version_4_reads_is_not_its_default(tmp_path):
    """The figures were compared once with those of transformers 4.57.1, for every family that it
    has."""
    config = written(tmp_path / "llama", CONFIGS["llama3 rope"].to_dict())
    assert config["rope_theta"] == 500_000 != THETA
    scaling = config["rope_scaling"]
    assert (
        scaling["rope_type"] == "llama3" and scaling["factor"] == 32 and "rope_theta" not in scaling
    )
    # Version 4 takes exactly three entries of a Phi-3, and other names of a GPT-NeoX.
    assert set(written(tmp_path / "phi3", CONFIGS["phi3"].to_dict())["rope_scaling"]) == {
        "type",
        "short_factor",
        "long_factor",
    }
    neox = written(tmp_path / "neox", CONFIGS["neox"].to_dict())
    assert (neox["rotary_pct"], neox["rotary_emb_base"]) == (0.25, THETA)
    # Version 5 rotates the whole of a Llama's heads.
    assert "partial_rotary_factor" not in written(
        tmp_path / "part", CONFIGS["llama partial"].to_dict()
    )
    assert (
        written(tmp_path / "phi3_part", CONFIGS["phi3 partial"].to_dict())["partial_rotary_factor"]
        == 0.5
    )


@pytest.mark.parametrize("method", ["merged", "fft"])
def test_a_merged_folder_has_both_and_the_version(method, models, tmp_path):
    folder = exported(models("smollm3", method), "merged", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    theta = CONFIGS["smollm3"].rope_parameters["rope_theta"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta != THETA
    assert config["rope_scaling"] is None
    assert config["transformers_version"] == transformers.__version__
