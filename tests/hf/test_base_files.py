"""What an export keeps of its base's config.json and settings."""

from __future__ import annotations

import shutil

import orjson
import pytest
from transformers import CONFIG_MAPPING

from pipeline.errors import BaseModelError
from pipeline.hf.base_files import base_config, copy_base_files, without_mtp_layers
from tests.extensions.hosted.exported import spec_of, tiny_config
from tests.files import change_json

EVIL = {"auto_map": {"AutoImageProcessor": "stranger/repo--code.Evil"}}
PROCESSORS = ("processor_config", "preprocessor_config", "video_preprocessor_config")


def test_settings_of_pictures_and_sound_name_no_code(base, tmp_path):
    folder = shutil.copytree(base("llama").path, tmp_path / "base")
    export = tmp_path / "export"
    export.mkdir()
    settings = {"image_processor_type": "CLIPImageProcessor", "size": [{"height": 8}]}
    for name in PROCESSORS:
        nested = {"image_processor": {**settings, **EVIL}, **settings, **EVIL}
        (folder / f"{name}.json").write_bytes(orjson.dumps(nested))
    copy_base_files(export, folder, folder)
    for name in PROCESSORS:
        copied = orjson.loads((export / f"{name}.json").read_bytes())
        assert copied == {"image_processor": settings, **settings}
    assert b"stranger" in (folder / "processor_config.json").read_bytes()


def test_settings_that_cannot_be_read_are_refused(base, tmp_path):
    folder = shutil.copytree(base("llama").path, tmp_path / "base")
    export = tmp_path / "export"
    export.mkdir()
    (folder / "preprocessor_config.json").write_text("[]")
    with pytest.raises(BaseModelError, match="expected a JSON object, found list; copy it again"):
        copy_base_files(export, folder, folder)


def test_a_config_names_no_code(base, tmp_path):
    folder = shutil.copytree(base("llama").path, tmp_path / "base")
    pipelines = {"any": {"impl": "stranger/repo--code.Evil", "pt": ["AutoModelForCausalLM"]}}
    change_json(folder / "config.json", custom_pipelines=pipelines, **EVIL)
    assert not {"custom_pipelines", "auto_map"} & set(base_config(folder))


def test_nor_does_that_of_a_hosted_base():
    pipelines = {"any": {"impl": "stranger/repo--code.Evil", "pt": ["AutoModelForCausalLM"]}}
    config = tiny_config("granite", custom_pipelines=pipelines, **EVIL)
    assert config.custom_pipelines == pipelines
    assert not {"custom_pipelines", "auto_map"} & set(spec_of(config).config)


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
