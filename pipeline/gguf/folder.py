"""The Hugging Face folder of a GGUF file's model, dequantized once.

transformers reads the file: it knows how each architecture's tensors are named and permuted. What
it leaves open is done here: the tokenizer's pattern, the licence, and a folder that appears whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pipeline import log
from pipeline.errors import BaseModelError, OutputError, faults_of_library
from pipeline.files.disk_space import free_bytes
from pipeline.files.folders import FolderKind, holds, published_folder
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_object, write_json
from pipeline.files.publishing import write_text
from pipeline.gguf.file import GgufFile, read_gguf
from pipeline.gguf.tokenizer import set_pre_tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

BASES = Path("runs/bases")
"""Where the folders of dequantized models lie, below the working directory."""
RECORD = "gguf_origin.json"
DEQUANTIZED = FolderKind("a dequantized model", RECORD, "scale-cpt dequantized GGUF 1")
_ONLY_OF_THE_FILE = ("quantization_config", "_model_name_or_path", "_name_or_path")
"""Entries that transformers adds to the configuration, and that are wrong in the folder."""
_logger = log.get_logger(__name__)


def dequantized_folder(file: Path) -> Path:
    """The folder in `BASES` that holds the model of the GGUF file `file`; makes it the first time.

    Raises:
        BaseModelError: no base can be made of the file, or the folder holds the model of another
            file of this name.
        MissingPackageError: the package gguf is not installed.
        OutputError: something else is in the folder's place.
    """
    folder = BASES / file.stem
    if _is_of(folder, file):
        return folder
    found = read_gguf(file)
    _logger.info(
        "%s: dequantizing %s to %s into %s, once", file, found.types[0], found.dtype, folder
    )
    dequantize(found, folder)
    return folder


def dequantize(
    file: GgufFile,
    folder: Path,
    *,
    name_on_hub: str | None = None,
    add_files: Callable[[Path], None] = lambda _: None,
) -> None:
    """Writes `folder` as a Hugging Face folder of the model in `file`; it appears whole.

    Args:
        name_on_hub: `org/name` of the model that the file was made from, for the card.
        add_files: adds further files to the folder before it appears.

    Raises:
        BaseModelError: transformers cannot read the file, or it is no whole language model.
        OutputError: something else is in the folder's place, or the disk is too small.
    """
    file.check()
    free = free_bytes(folder)
    if free < file.dequantized_bytes:
        raise OutputError(
            f"{folder}: expected {file.dequantized_bytes / 1e9:.3g} GB free for the weights of "
            f"{file.path}, found {free / 1e9:.3g}; free some, or call this on another disk"
        )
    what = f"{file.path}: transformers cannot read it; use the model's own folder as the base"
    with faults_of_library(what, BaseModelError):
        model = _loaded_model(file)
        tokenizer = _loaded_tokenizer(file)
    with published_folder(folder, DEQUANTIZED) as partial:
        _write_model(model, partial)
        tokenizer.save_pretrained(partial)
        write_text(partial / "README.md", _card(file, name_on_hub or file.name_on_hub))
        add_files(partial)
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        status = file.path.stat()
        record = {
            "format": DEQUANTIZED.format,
            "file": file.path.name,
            "sha256": file_hash(file.path),
            "bytes": status.st_size,
            "date": status.st_mtime_ns,
            "files": sizes,
        }
        write_json(partial / RECORD, record)


def _is_of(folder: Path, file: Path) -> bool:
    """Whether `folder` holds, whole, what was dequantized from `file`.

    Raises:
        BaseModelError: it holds what was dequantized from another file.
    """
    if not holds(DEQUANTIZED, folder):
        return False
    record = read_object(folder / RECORD, BaseModelError, "move the folder away")
    status = file.stat()
    is_as_then = (status.st_size, status.st_mtime_ns) == (record.get("bytes"), record.get("date"))
    # A file that was copied or downloaded again has another date, and the same content.
    if not is_as_then and file_hash(file) != record.get("sha256"):
        raise BaseModelError(
            f"{folder}: expected the model of {file}, found that of another file of this name; "
            "move the folder away, or rename the file"
        )
    for name, size in record.get("files", {}).items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            _logger.info("%s: %s differs from what was written; making it again", folder, name)
            return False
    return True


def _loaded_model(file: GgufFile) -> PreTrainedModel:
    # Imported here: who has no GGUF file does not wait for them.
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model: PreTrainedModel
    model, found = AutoModelForCausalLM.from_pretrained(
        file.path.parent,
        gguf_file=file.path.name,
        dtype=getattr(torch, file.dtype),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are named and refused below
        **_without_blocks(),
        **_attention_scale(file),
    )
    _check_all_is_read(file, model, found)
    _check_rotary_base(file, model.config)
    return model


def _without_blocks() -> dict[str, Any]:
    """The argument for values where transformers has kernels that compute with packed blocks."""
    try:
        from transformers import GgufConfig
    except ImportError:  # an older transformers, which always gives values
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _attention_scale(file: GgufFile) -> dict[str, int]:
    """Gemma's scale of attention, which is in no file: llama.cpp knows it by the number of layers,
    and transformers takes that of the small models for all."""
    layers_of_27b = {"gemma2": 46, "gemma3": 62}.get(file.architecture)
    if layers_of_27b is None:
        return {}
    scale = file.value("embedding_length") // file.value("attention.head_count")
    if file.value("block_count") != layers_of_27b:
        scale = file.value("attention.key_length", scale)
    return {"query_pre_attn_scalar": scale}


def _check_all_is_read(file: GgufFile, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """Refuses a file that gives a parameter no values, or that has values for none.

    transformers draws the former at random, and drops the latter without a word: it names them
    only for some architectures, so values are counted.

    Raises:
        BaseModelError: which parameters, or how many values.
    """
    kind = type(model).__name__
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found[fault]:
            names = sorted(map(str, found[fault]))
            raise BaseModelError(
                f"{file.path}: expected the weights of {kind}, found {fault.replace('_', ' ')}: "
                f"{names[0]} and {len(names) - 1} more; use the model's own folder as the base"
            )
    # Some files hold a tied output once more.
    weights = model.state_dict() if "output.weight" in file.sizes else _untied(model)
    count = sum(weight.numel() for weight in weights.values())
    if file.count_elements() > count:
        raise BaseModelError(
            f"{file.path}: expected the {count:,} values of {kind}, found "
            f"{file.count_elements():,}: transformers does not read some, such as biases; use the "
            "model's own folder as the base"
        )


def _check_rotary_base(file: GgufFile, config: PretrainedConfig) -> None:
    """Refuses a file whose base of rotary frequencies transformers leaves out, as of StarCoder 2.

    Raises:
        BaseModelError: the configuration has another.
    """
    base = file.value("rope.freq_base")
    rotary = getattr(config, "rope_parameters", None) or {}
    # Where kinds of layers differ, there is an entry for each.
    kinds = [values for values in (rotary, *rotary.values()) if isinstance(values, dict)]
    found = [values["rope_theta"] for values in kinds if "rope_theta" in values]
    if base is not None and found and base not in found:
        raise BaseModelError(
            f"{file.path}: {file.architecture}.rope.freq_base: expected {found[0]:g}, which "
            f"transformers takes for every such file, found {base:g}; use the model's own folder "
            "as the base"
        )


def _loaded_tokenizer(file: GgufFile) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    set_pre_tokenizer(
        tokenizer,
        file.metadata.get("tokenizer.ggml.model"),
        file.metadata.get("tokenizer.ggml.pre"),
        file.path,
    )
    return tokenizer


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    """Writes weights and configuration; the same model gives the same bytes, which identify a base.

    `save_pretrained` refuses a model that was quantized.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    weights = _untied(model)
    split = split_torch_state_dict_into_shards(weights)
    for file_name, names in split.filename_to_tensors.items():
        # Of several entries safetensors writes the metadata in a random order.
        save_file({name: weights[name] for name in names}, folder / file_name, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    config = orjson.loads(model.config.to_json_string(use_diff=True))
    for key in _ONLY_OF_THE_FILE:
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    write_json(folder / "config.json", config)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights by name; of a tensor with two names, as a tied output, the first."""
    weights: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in places:
            places.add(weight.data_ptr())
            weights[name] = weight.contiguous()
    return weights


def _card(file: GgufFile, name_on_hub: str | None) -> str:
    """The card: the licence and languages that the file names, and where the weights are from."""
    lines = ["---"]
    licence = file.metadata.get("general.license")
    if isinstance(licence, str):
        lines.append(f"license: {licence!r:.80}")
    if name_on_hub is not None:
        lines.append(f"base_model: {name_on_hub}")
    lines.append("---")
    lines.append("")
    lines.append(
        f"The weights of the GGUF file `{file.path.name}` ({', '.join(file.types)}), dequantized "
        f"to {file.dtype}."
    )
    return "\n".join(lines) + "\n"
