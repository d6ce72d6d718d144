"""What an export keeps of its base's folder: its licence, its settings and the entries of its
config.json.

The folder comes from a stranger and the export may be published: names are fixed or match a
pattern, and no link leads out of the folder.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.errors import BaseModelError
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_object, write_json
from pipeline.hf.base_card import CARD
from pipeline.hf.tokenizer_files import copy_file, copy_tokenizer, matching_files, tokenizer_files
from pipeline.model.from_hf import hf_config, model_type_of, read_spec

# Entries that describe the base's own folder and are wrong in an export.
_CONFIG_OF_BASE_ONLY = (
    "_name_or_path",
    "auto_map",
    "custom_pipelines",
    "transformers_version",
    "torch_dtype",
    "quantization_config",
)
# How many layers predict tokens after the next one (MTP), by the names that configurations have for
# it. No export has such layers.
_MTP_LAYERS = re.compile(r"num_nextn_predict_layers|num_mtp_(layers|modules)|mtp_num_hidden_layers")
# Lists with an entry for each layer, in some configurations also for those.
_BY_LAYER = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
# How a multimodal base reads pictures and sound.
_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_SETTINGS_FILES = ("generation_config.json", *_PROCESSOR_FILES)
# Licences ask that they, notices and policies are passed on.
_TERMS = re.compile(
    r"(?i)(licen[cs]e|notice|copyright|copying|(acceptable_)?use_policy)([-_.][\w.-]*)?"
)


def terms_in(folder: Path) -> list[str]:
    """The names of the licence, notice and policy files in `folder`."""
    return matching_files(folder, _TERMS)


def copy_base_files(folder: Path, base: Path, tokenizer: Path) -> None:
    """Copies into `folder` the licence and settings of the folder `base`, and the tokenizer of the
    folder `tokenizer`.

    Code that the settings of pictures and sound name is not kept: who trusts the export would run a
    stranger's.

    Raises:
        BaseModelError: a file cannot be read, or links out of its folder.
    """
    for name in _SETTINGS_FILES:
        copy_file(base, name, folder / name)
    for name in _PROCESSOR_FILES:
        with suppress(FileNotFoundError):
            write_json(folder / name, _without_code(read_object(folder / name, BaseModelError)))
    copy_terms(folder, base)
    copy_tokenizer(folder, tokenizer)


def _without_code(settings: Any) -> Any:
    """The settings in a file without an `auto_map`, also in the settings of a part: a
    processor_config.json holds those of pictures, videos and sound."""
    if isinstance(settings, list):
        return [_without_code(item) for item in settings]
    if not isinstance(settings, dict):
        return settings
    return {key: _without_code(item) for key, item in settings.items() if key != "auto_map"}


def hashes_of_read_files(base: Path, tokenizer: Path) -> dict[str, str]:
    """The SHA-256 of every file but the weights that an export depends on: of the folder `base` and
    of the folder `tokenizer`, by its name there."""
    hashes: dict[str, str] = {}
    for name in ("config.json", CARD, *_SETTINGS_FILES, *terms_in(base)):
        if (base / name).is_file():
            hashes[f"base/{name}"] = file_hash(base / name)
    for name in tokenizer_files(tokenizer):
        if (tokenizer / name).is_file():
            hashes[f"tokenizer/{name}"] = file_hash(tokenizer / name)
    return hashes


def copy_terms(folder: Path, base: Path) -> None:
    """Copies into `folder` the licence, notices and policies of the folder `base`.

    Raises:
        BaseModelError: a file cannot be read, or links out of its folder.
    """
    for name in terms_in(base):
        copy_file(base, name, folder / name)


def text_token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json that name the tokens around a text, where it has them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if name in config}


def base_config(base: Path) -> dict[str, Any]:
    """The config.json of the folder `base`, without the entries that are true of that folder only.

    The class is named that AutoModel takes: servers go by the name, and would run a mistral with
    `layer_types` as one without. Rotary embeddings are described as transformers 5 reads them, and
    as 4 does.
    """
    config = read_object(base / "config.json", BaseModelError, "copy the folder again")
    model_type = model_type_of(config)
    if model_type != config.get("model_type"):
        config["model_type"] = model_type
        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    for key in _CONFIG_OF_BASE_ONLY:
        config.pop(key, None)

    spec = read_spec(base)
    rotated = 0
    for layer in spec.layers:
        if layer.rotary is not None:
            # A frequency is of a pair of channels.
            rotated = max(rotated, 2 * len(layer.rotary.frequencies))
    config |= _rotary_entries(config, in_part=rotated < spec.head_dim)
    config["transformers_version"] = transformers.__version__
    return without_mtp_layers(config)


def without_mtp_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without layers that predict tokens after the next one: they are not exported.

    A server would look for their weights, also where the configuration's default has such layers.
    """
    changed = dict(config)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        changed["text_config"] = without_mtp_layers(text)
    layers = config.get("num_hidden_layers")
    for name, count in config.items():
        if not _MTP_LAYERS.fullmatch(name):
            continue
        changed[name] = 0
        for of_layers in _BY_LAYER:
            values = config.get(of_layers)
            if count and isinstance(values, list) and len(values) == layers + count:
                changed[of_layers] = values[:layers]
    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING:
        by_default = getattr(CONFIG_MAPPING[model_type], "num_mtp_layers", None)
        if by_default:
            changed["num_nextn_predict_layers"] = 0
    return changed


def _rotary_entries(config: Mapping[str, Any], in_part: bool) -> dict[str, Any]:
    """The entries of a config.json that describe its rotary embedding, in both forms that
    transformers has had.

    Version 5 writes `rope_parameters`, of which version 4 knows nothing: it would take its default
    without a word. An entry of the older form is left out where version 5 would read it otherwise.

    in_part: only a part of each head is rotated. Of Llama's heads version 5 rotates the whole
    whatever the entry says, and version 4 a part.
    """
    parameters = _rope_parameters(config)
    if not parameters:
        return {}
    entries: dict[str, Any] = {"rope_parameters": parameters}
    whole = parameters.get("full_attention", parameters)
    older: dict[str, Any] = {"rope_theta": whole["rope_theta"], "rope_scaling": None}
    if config["model_type"] == "gpt_neox":
        older["rotary_emb_base"] = whole["rope_theta"]
        older["rotary_pct"] = whole.get("partial_rotary_factor", 1.0)
    elif in_part and "partial_rotary_factor" in whole:
        older["partial_rotary_factor"] = whole["partial_rotary_factor"]
    if "sliding_attention" in parameters:
        older["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    kind = whole.get("rope_type", "default")
    if config["model_type"] == "phi3" and kind == "longrope":
        # Version 4 takes these three alone.
        older["rope_scaling"] = {
            "type": kind,
            "short_factor": whole["short_factor"],
            "long_factor": whole["long_factor"],
        }
    elif kind != "default":
        scaling = dict(whole)
        for key in ("rope_theta", "partial_rotary_factor", "type"):
            scaling.pop(key, None)
        older["rope_scaling"] = scaling
    for key, value in older.items():
        if config.get(key) is not None:
            value = config[key]
        if _rope_parameters({**config, **entries, key: value}) == parameters:
            entries[key] = value
    return entries


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embeddings of a supported config.json as this version of transformers
    reads them."""
    read: dict[str, Any] = hf_config(copy.deepcopy(dict(config))).rope_parameters or {}
    for one in (read, *read.values()):
        if isinstance(one, dict):
            one.pop("type", None)  # the older name of rope_type
    return read
