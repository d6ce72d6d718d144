"""Writing a Hugging Face folder: weights in files of a few GiB with their index, configuration, tokenizer, licences."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.conversion.modeling_scale import ScaleConfig, ScaleForCausalLM
from pipeline.errors import BaseModelError
from pipeline.files import write_json, write_text
from pipeline.log import progress_bar
from pipeline.model.base_folder import INDEX_FILE
from pipeline.model.from_hf import RESIDUAL_KEY
from pipeline.model.spec import StoredResidual

# --- What a conversion is going to write: a list of tensors, each made when its turn comes, and a configuration -----


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the output: its shape is known beforehand, its values are read or fused by `make`."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass(frozen=True)
class FileNames:
    """What the files of a folder are called. `in_parts` says whether weights of many GiB lie in several."""

    weights: str
    config: str
    in_parts: bool


MODEL = FileNames("model.safetensors", "config.json", in_parts=True)
ADAPTER = FileNames("adapter_model.safetensors", "adapter_config.json", in_parts=False)


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder to be written.

    Attributes:
        format: `stock`, `scale` or `peft`.
        config: the contents of the configuration.
        tensors: in the order in which they are written.
        dtype: what they are written in.
        code: files of Python that the folder carries, by name.
        files: what weights and configuration are called.
    """

    format: str
    config: Mapping[str, Any]
    tensors: Sequence[PlannedTensor]
    dtype: torch.dtype
    code: Mapping[str, str] = field(default_factory=dict)
    files: FileNames = MODEL


# --- Writing a safetensors file one tensor at a time ----------------------------------------------------------------
# The library's own writer takes all tensors of a file at once, and copies them: for files of some GiB that is most of a
# small machine's memory. The format is a length, a JSON header and the bytes, in the order of the header.

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(
    path: Path, tensors: Sequence[PlannedTensor], dtype: torch.dtype, written: Callable[[int], object]
) -> None:
    """Writes `tensors` to `path` in `dtype`, holding one of them at a time; tells `written` of the bytes of each."""
    header = _header(tensors, dtype)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for planned in tensors:
            tensor = planned.make().to(dtype).contiguous()
            if tuple(tensor.shape) != planned.shape:
                raise AssertionError(f"{planned.name}: made {tuple(tensor.shape)}, planned {planned.shape}")
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            written(tensor.nbytes)


def _header(tensors: Sequence[PlannedTensor], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for planned in tensors:
        stop = at + planned.elements * dtype.itemsize
        entries[planned.name] = {"dtype": _DTYPE_NAMES[dtype], "shape": planned.shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


# --- What a folder's config.json takes over from the base's ---------------------------------------------------------

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Of the base as it was downloaded, and untrue of what is made of it.
_NOT_TAKEN_OVER = ("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "quantization_config")


def base_config(base: Path) -> dict[str, Any]:
    """The base's config.json without what holds for that folder only."""
    path = base / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise BaseModelError(f"{path}: the base is quantized; give the folder of its original weights")
    return {key: value for key, value in config.items() if key not in _NOT_TAKEN_OVER}


def token_ids(config: dict[str, Any]) -> dict[str, Any]:
    """The ids of the special tokens."""
    return {key: config[key] for key in _TOKEN_IDS if key in config}


def residual_config(residual: StoredResidual) -> dict[str, Any]:
    """What `model.from_hf` finds again when the folder is a base."""
    return {RESIDUAL_KEY: asdict(residual)}


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json spells it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


# --- Writing a Hugging Face folder: weights in files of a few GiB ---

FILE_BYTES = 4 * 2**30
# Fixed names: nothing that a file says decides where we write.
_FROM_BASE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)


def write_hf_folder(folder: Path, export: Export, base: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """Fills the existing `folder`. One tensor is held at a time."""
    files: Sequence[Sequence[PlannedTensor]] = [export.tensors]
    if export.files.in_parts:
        files = shards(export.tensors, file_bytes // export.dtype.itemsize)
    names = [export.files.weights]
    if len(files) > 1:
        names = [_shard_name(index, len(files)) for index in range(len(files))]
    size = sum(tensor.elements for tensor in export.tensors) * export.dtype.itemsize
    with progress_bar("writing", size, "B") as bar:
        for name, tensors in zip(names, files, strict=True):
            write_safetensors(folder / name, tensors, export.dtype, bar.update)
    if len(files) > 1:
        weight_map = {tensor.name: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        total = {"total_parameters": size // export.dtype.itemsize, "total_size": size}
        write_json(folder / INDEX_FILE, {"metadata": total, "weight_map": weight_map})
    for name, text in export.code.items():
        write_text(folder / name, text)
    for name in _FROM_BASE:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    write_json(folder / export.files.config, export.config)


def shards(tensors: Sequence[PlannedTensor], elements: int) -> list[list[PlannedTensor]]:
    """Runs of `tensors` of at most `elements` each; a larger tensor has a run of its own."""
    runs: list[list[PlannedTensor]] = []
    room = 0
    for tensor in tensors:
        if not runs or tensor.elements > room:
            runs.append([])
            room = elements
        runs[-1].append(tensor)
        room -= tensor.elements
    return runs


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


# --- Loading a Hugging Face folder as `transformers` does, ours included, without running code from the folder ------

# Folders of the scale format carry the code that this package has itself: it is used from here, not from there.
AutoConfig.register(ScaleConfig.model_type, ScaleConfig, exist_ok=True)
AutoModelForCausalLM.register(ScaleConfig, ScaleForCausalLM, exist_ok=True)


def load_hf_model(
    folder: Path, dtype: torch.dtype | None = None, *, device: str = "cpu", trust_remote_code: bool = False
) -> Any:  # noqa: ANN401
    """The causal language model in `folder`, ready for inference; in the type of its files where `dtype` is None.

    Raises:
        BaseModelError: the folder is missing or damaged, lacks weights, or needs code that the user does not trust.
    """
    check_hf_config(folder, trust_remote_code=trust_remote_code)
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BaseModelError(f"{folder}: cannot be loaded by transformers: {reason}") from None
    # transformers fills in what is missing with random numbers, and says so in a warning only.
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found[fault]:
            names = sorted(map(str, found[fault]))
            raise BaseModelError(f"{folder}: {fault.replace('_', ' ')}: {names[0]} and {len(names) - 1} more")
    return model.to(device).eval()


def load_exported(folder: Path, base: Path, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """A folder that a conversion wrote, as others load it: by transformers, or, where it holds adapters only, by PEFT
    beside the `base`."""
    if not (folder / ADAPTER.config).exists():
        return load_hf_model(folder, dtype)
    from peft import PeftModel  # only where adapters are written

    return PeftModel.from_pretrained(load_hf_model(base, dtype), str(folder)).eval()


def check_hf_config(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Says before any weight is read what would be wrong with a folder.

    Raises:
        BaseModelError: it holds no model's config.json, adapters alone, or code that the user does not trust.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / ADAPTER.config).exists():
            raise BaseModelError(
                f"{folder}: holds adapters without their base; expected a whole model: convert the checkpoint again "
                "with --format stock, which merges them"
            ) from None
        raise BaseModelError(f"{path}: no such file; expected a Hugging Face model folder") from None
    except ValueError as error:
        raise BaseModelError(f"{path}: not a model's config ({error}); copy the folder again") from None
    if config.get("auto_map") and config.get("model_type") != ScaleConfig.model_type and not trust_remote_code:
        raise BaseModelError(f"{path}: needs the code in its folder; say --trust-remote-code if you trust its maker")
