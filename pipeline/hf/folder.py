"""Hugging Face folders: an exported model is written file by file, and loaded as `transformers` loads it.

What an export keeps of its base's folder comes from a stranger and may be published: names are fixed or match a
pattern, and no link leads out of the folder.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.data.tokenizer.chats import TEMPLATE, template_in
from pipeline.data.tokenizer.extension.vocabulary import EXPORTED, RECORD
from pipeline.data.tokenizer.load import (
    TOKENIZER_FILE,
    SentencePieceEncoder,
    load_tokenizer,
    without_dropout,
)
from pipeline.data.tokenizer.sentencepiece_model import MODEL_FILES, converted
from pipeline.data.tokenizer.settings import read_as_it_is
from pipeline.errors import BaseModelError, ConversionError, faults_of_library
from pipeline.files import file_hash, read_inside, read_object, write_json, write_text
from pipeline.hf import Exported
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.remote_code.configuration_scale_combined import CombinedConfig
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.modeling_scale_combined import CombinedForCausalLM
from pipeline.log import progress_bar
from pipeline.model.base_folder import INDEX_FILE, files_by_tensor
from pipeline.model.families import FAMILIES
from pipeline.model.from_hf import hf_config, loading_options, model_type_of, read_spec

FILE_BYTES = 2**30
"""The largest file of weights; one is in memory at a time."""
# Entries that describe the base's own folder and are wrong in an export.
_CONFIG_OF_BASE_ONLY = (
    "_name_or_path",
    "auto_map",
    "transformers_version",
    "torch_dtype",
    "quantization_config",
)
# Licences ask that they, notices and policies are passed on.
_TERMS = re.compile(
    r"(?i)(licen[cs]e|notice|copyright|copying|(acceptable_)?use_policy)([-_.][\w.-]*)?"
)
_TOKENIZER = re.compile(
    r"(tokenizer|spiece|sentencepiece\.bpe)\.model|tokenizer\.model\.v\d+|[\w-]+\.tiktoken|tekken\.json|vocab\.(json|txt)|"
    r"merges\.txt|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template)\.json|chat_template\.jinja"
)
CONFIGURATION_FILE = Path(inspect.getfile(ScaleConfig)).name
"""The file of code that every folder of the scale format carries, and transformers imports first."""
_MORE_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: its shape is known beforehand, `make` reads or computes its values.

    `dtype`: the type in which it is written; None: that of the export.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder to be written.

    `config` is the contents of config.json; `tensors` are written in this order and in `dtype`; `code` are the Python
    files that the folder carries.
    """

    format: Exported
    config: Mapping[str, Any]
    tensors: Sequence[PlannedTensor]
    dtype: torch.dtype
    code: Sequence[Path] = ()


def write_hf_folder(
    folder: Path, export: Export, base: Path, *, tokenizer: Path | None = None
) -> None:
    """Writes `export` into the existing `folder`, with the tokenizer of the folder `tokenizer`, by default `base`.

    Raises BaseModelError: a file of the base cannot be read, or links out of its folder.
    """
    write_tensors(folder, export.tensors, export.dtype)
    copy_code(folder, export.code)
    copy_base_files(folder, base, tokenizer or base)
    add_tokenizer_json(folder, tokenizer or base)
    write_json(folder / "config.json", export.config)


def write_tensors(folder: Path, tensors: Sequence[PlannedTensor], dtype: torch.dtype) -> None:
    """Writes files of weights of FILE_BYTES, or of one larger tensor, and their index into `folder`."""
    planned = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        planned,
        get_storage_size=lambda tensor: prod(tensor.shape) * (tensor.dtype or dtype).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )

    def made(planned: PlannedTensor) -> Tensor:
        # Of its own memory: parts of a base's fused matrix share theirs, which safetensors refuses.
        tensor = (
            planned.make().to(planned.dtype or dtype).clone(memory_format=torch.contiguous_format)
        )
        assert tuple(tensor.shape) == planned.shape, planned.name
        bar.update(tensor.nbytes)
        return tensor

    total_size = split.metadata["total_size"]
    with progress_bar("writing", total_size, "B") as bar:
        for name, names in split.filename_to_tensors.items():
            save_file(
                {tensor: made(planned[tensor]) for tensor in names}, folder / name, {"format": "pt"}
            )
    if split.is_sharded:
        metadata = {
            "total_parameters": sum(prod(tensor.shape) for tensor in tensors),
            "total_size": total_size,
        }
        write_json(
            folder / INDEX_FILE, {"metadata": metadata, "weight_map": split.tensor_to_filename}
        )


def stored_tensors(folder: Path) -> dict[str, PlannedTensor]:
    """The tensors of the files of weights in `folder`, by name, each read when it is made.

    Raises ConversionError: a file is damaged; so does `make`.
    """

    def read(path: Path, name: str) -> Tensor:
        with (
            faults_of_library(f"{path}: damaged", ConversionError),
            safe_open(path, framework="pt") as file,
        ):
            tensor: Tensor = file.get_tensor(name)
            return tensor

    found = dict[str, PlannedTensor]()
    for path in sorted(folder.glob("*.safetensors")):
        with (
            faults_of_library(f"{path}: damaged", ConversionError),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                dtype = torch.float32 if name.startswith("token_gate.") else None
                shape = tuple(file.get_slice(name).get_shape())
                found[name] = PlannedTensor(name, shape, partial(read, path, name), dtype)
    return found


def terms_in(folder: Path) -> list[str]:
    """The names of the licence, notice and policy files in `folder`."""
    return _matching(folder, _TERMS)


def _matching(folder: Path, names: re.Pattern[str]) -> list[str]:
    return sorted(
        path.name for path in folder.glob("*") if names.fullmatch(path.name) and not path.is_dir()
    )


def copy_base_files(folder: Path, base: Path, tokenizer: Path) -> None:
    """Copies into `folder` the licence and settings of the folder `base`, and the tokenizer of the folder `tokenizer`.

    Raises BaseModelError: a file cannot be read, or links out of its folder.
    """
    for name in ("generation_config.json", *terms_in(base)):
        _copy(base, name, folder / name)
    copy_tokenizer(folder, tokenizer)


def copy_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Copies into `folder` the tokenizer of the folder `tokenizer`, so that every server reads its tokenizer.json.

    The chat template is put where every server looks: a file of its own, and tokenizer_config.json. Code that the
    latter names is not kept: the only code of an export is that of `remote_code`. Nor is a class that would build
    another tokenizer than tokenizer.json says, and BPE dropout is off, as in training.

    Raises BaseModelError: a file cannot be read, or links out of its folder.
    """
    templates = _matching(tokenizer / _MORE_TEMPLATES, re.compile(r"[\w-]+\.jinja"))
    for name in (
        *_matching(tokenizer, _TOKENIZER),
        *(f"{_MORE_TEMPLATES}/{name}" for name in templates),
    ):
        _copy(tokenizer, name, folder / name)
    _copy(tokenizer, RECORD, folder / EXPORTED)
    with suppress(FileNotFoundError):
        without = without_dropout(read_object(folder / TOKENIZER_FILE, BaseModelError))
        if without is not None:
            write_json(folder / TOKENIZER_FILE, without)
    path, config = folder / "tokenizer_config.json", dict[str, Any]()
    with suppress(FileNotFoundError):
        config = read_object(path, BaseModelError)
    template = template_in(folder, config)
    if template is not None:
        write_text(folder / TEMPLATE, template)
        if not isinstance(config.get("chat_template"), list):
            config["chat_template"] = template
    config.pop("auto_map", None)
    if (folder / TOKENIZER_FILE).exists():
        config = read_as_it_is(config, read_object(folder / TOKENIZER_FILE, BaseModelError))
    if config:
        write_json(path, config)


def add_tokenizer_json(folder: Path, tokenizer: Path) -> None:
    """Writes a tokenizer.json into `folder` where the folder `tokenizer` has only a model of SentencePiece.

    Raises DataError where that cannot be read or converted.
    """
    if (folder / TOKENIZER_FILE).exists() or not any(
        (tokenizer / name).exists() for name in MODEL_FILES
    ):
        return
    loaded = load_tokenizer(tokenizer)
    assert isinstance(loaded.reference, SentencePieceEncoder), "a folder without a tokenizer.json"
    library = converted(loaded.reference.model, loaded.document_start)
    write_text(folder / TOKENIZER_FILE, library.to_str())
    path, config = folder / "tokenizer_config.json", dict[str, Any]()
    with suppress(FileNotFoundError):
        config = read_object(path, BaseModelError)
    processor = loaded.reference.model.processor
    ids = {
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "unk_token": processor.unk_id(),
    }
    own = {name: processor.id_to_piece(number) for name, number in ids.items() if number >= 0}
    write_json(path, read_as_it_is({**own, **config}, json.loads(library.to_str())))


def _copy(source: Path, name: str, written: Path) -> None:
    """Copies a file of the folder `source`, if there is one."""
    with suppress(FileNotFoundError):
        content = read_inside(source, name, BaseModelError)
        written.parent.mkdir(exist_ok=True)
        written.write_bytes(content)


def base_config(base: Path) -> dict[str, Any]:
    """The config.json of the folder `base`, without the entries that are true of that folder only.

    The class is named that AutoModel takes: servers go by the name, and would run a mistral with `layer_types` as one
    without. Rotary embeddings are described as transformers 5 reads them, and as 4 does.
    """
    config = read_object(base / "config.json", BaseModelError, "copy the folder again")
    model_type = model_type_of(config)
    if model_type != config.get("model_type"):
        config |= {
            "model_type": model_type,
            "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        }
    kept = {key: value for key, value in config.items() if key not in _CONFIG_OF_BASE_ONLY}
    spec = read_spec(base)
    rotated = [
        2 * len(layer.rotary.frequencies) for layer in spec.layers if layer.rotary is not None
    ]
    in_part = max(rotated, default=0) < spec.head_dim
    return (
        kept | _rotary_entries(kept, in_part) | {"transformers_version": transformers.__version__}
    )


def _rotary_entries(config: Mapping[str, Any], in_part: bool) -> dict[str, Any]:
    """The entries of a config.json that describe its rotary embedding, in both forms that transformers has had.

    Version 5 writes `rope_parameters`, of which version 4 knows nothing: it would take its default without a word. An
    entry of the older form is left out where version 5 would read it otherwise.

    in_part: only a part of each head is rotated. Of Llama's heads version 5 rotates the whole whatever the entry says,
    and version 4 a part.
    """
    parameters = _rope_parameters(config)
    if not parameters:
        return {}
    entries: dict[str, Any] = {"rope_parameters": parameters}
    whole = parameters.get("full_attention", parameters)
    older: dict[str, Any] = {"rope_theta": whole["rope_theta"], "rope_scaling": None}
    if config["model_type"] == "gpt_neox":
        older |= {
            "rotary_emb_base": whole["rope_theta"],
            "rotary_pct": whole.get("partial_rotary_factor", 1.0),
        }
    elif in_part and "partial_rotary_factor" in whole:
        older["partial_rotary_factor"] = whole["partial_rotary_factor"]
    if "sliding_attention" in parameters:
        older["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    kind = whole.get("rope_type", "default")
    if config["model_type"] == "phi3" and kind == "longrope":  # version 4 takes these three alone
        older["rope_scaling"] = {
            "type": kind,
            **{key: whole[key] for key in ("short_factor", "long_factor")},
        }
    elif kind != "default":
        elsewhere = ("rope_theta", "partial_rotary_factor", "type")
        older["rope_scaling"] = {key: value for key, value in whole.items() if key not in elsewhere}
    for key, value in older.items():
        is_stated = config.get(key) is not None
        candidate = {**config, **entries, key: config[key] if is_stated else value}
        if _rope_parameters(candidate) == parameters:
            entries[key] = candidate[key]
    return entries


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embeddings of a supported config.json as this version of transformers reads them."""
    read: dict[str, Any] = hf_config(copy.deepcopy(dict(config))).rope_parameters or {}
    for one in (read, *read.values()):
        if isinstance(one, dict):
            one.pop("type", None)  # the older name of rope_type
    return read


def dtype_name(dtype: torch.dtype) -> str:
    """A type as config.json spells it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def code_files(model: type) -> list[Path]:
    """The file of a model's class and those that it imports, which its folder carries beside the weights."""
    file = Path(inspect.getfile(model))
    return [file, *map(Path, sorted(set(get_relative_import_files(file))))]


def copy_code(folder: Path, files: Sequence[Path]) -> None:
    """Copies the Python files of an export into `folder`; their configuration file ends with a hash of them all.

    transformers takes a model's class by that of its configuration, which it knows by the contents of that file alone.
    Two folders with other code beside an equal configuration file would both run the code that is loaded first.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file_hash(file)}\n".encode())
        shutil.copy(file, folder)
    if files:
        path = folder / CONFIGURATION_FILE
        write_text(
            path,
            f"{path.read_text(encoding='utf-8')}# The code of this folder: {digest.hexdigest()}\n",
        )


# Folders of the scale format are loaded with the package's own copy of the code that they carry.
OWN_MODELS = {ScaleConfig: ScaleForCausalLM, CombinedConfig: CombinedForCausalLM}
for _config, _model in OWN_MODELS.items():
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)


def load_hf_model(
    folder: Path,
    dtype: torch.dtype | None = None,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Any:
    """The causal language model in `folder`, ready for inference; `dtype` None: in the type of its files.

    Raises BaseModelError: the folder is missing or damaged, lacks weights, or needs code that the user does not trust.
    """
    values = check_hf_config(folder, trust_remote_code=trust_remote_code)
    files_by_tensor(folder)  # training must read the same weights
    transformers.utils.logging.disable_progress_bar()
    with faults_of_library(f"{folder}: cannot be loaded by transformers", BaseModelError):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **(loading_options(values) if values.get("model_type") in tuple(FAMILIES) else {}),
        )
    # transformers fills what is missing with random numbers, and only warns.
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found[fault]:
            names = sorted(map(str, found[fault]))
            raise BaseModelError(
                f"{folder}: {fault.replace('_', ' ')}: {names[0]} and {len(names) - 1} more"
            )
    return model.to(device).eval()


def taken_ends(model: Any) -> list[int]:
    """Every `eos_token_id` of the model's generation_config.json, as chat models have several; the rest is forgotten.

    `generate` fills what a given configuration leaves open from the model's own: Llama's, for one, lowers the
    temperature and cuts off the tail of the distribution.
    """
    ends = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig()
    return [ends] if isinstance(ends, int) else list(ends or ())


def check_hf_config(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Checks a model's folder before any weight is read, and returns the contents of its config.json.

    Raises BaseModelError: it holds no model's config.json, or code that the user does not trust.
    """
    path = folder / "config.json"
    try:
        config = read_object(path, BaseModelError, "copy the folder again")
    except FileNotFoundError:
        raise BaseModelError(
            f"{path}: no such file; expected a Hugging Face model folder"
        ) from None
    # For these the package has code of its own, and does not look at the folder's.
    known = (*(own.model_type for own in OWN_MODELS), *FAMILIES)
    if config.get("auto_map") and config.get("model_type") not in known and not trust_remote_code:
        raise BaseModelError(
            f"{path}: needs the code in its folder; say --trust-remote-code if you trust its maker"
        )
    return config
