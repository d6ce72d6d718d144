"""What an export's config.json keeps of its base's."""

from __future__ import annotations

import shutil

import pytest
from transformers import CONFIG_MAPPING

from pipeline.hf.base_files import base_config, without_mtp_layers
from tests.files import change_json


@pytest.mark.parametrize("stated", [{}, {"num_nextn_predict_layers": 2}])
@pytest.mark.parametrize("name", ["glm4_moe", "exaone_moe", "solar_open"])
def test_no_layers_that_predict_further_tokens_are_announced(name, stated, base, tmp_path):
    """Not by the base's entry, nor by the default of transformers where there is none."""
    folder = shutil.copytree(base(name).path, tmp_path / "base")
    change_json(folder / "config.json", **stated)
    config = base_config(folder)
    read = CONFIG_MAPPING[name].from_dict(config)
    assert getattr(read, "num_mtp_layers", 0) == 0
    assert getattr(read, "num_nextn_predict_layers", 0) == 0
    assert config["num_hidden_layers"] == base(name).spec.num_layers


def test_they_are_left_out_of_a_multimodal_base_and_of_lists_by_layer():
    text = {"num_hidden_layers": 2, "num_mtp_layers": 1, "layer_types": ["a", "b", "c"]}
    config = {"model_type": "unknown", "num_nextn_predict_layers": 1, "text_config": text}
    assert without_mtp_layers(config) == {
        "model_type": "unknown",
        "num_nextn_predict_layers": 0,
        "text_config": {"num_hidden_layers": 2, "num_mtp_layers": 0, "layer_types": ["a", "b"]},
    }
    assert text["num_mtp_layers"] == 1
    plain = {"model_type": "llama", "num_hidden_layers": 2}
    assert without_mtp_layers(plain) == plain
