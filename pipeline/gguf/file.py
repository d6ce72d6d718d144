"""Reads what a GGUF file says of its model, and refuses those from which no base can be made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import BaseModelError, MissingPackageError, faults_of_library

SUFFIX = ".gguf"
_UNQUANTIZED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HUB_URL = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?")
_ROTARY_FACTORS = "rope_freqs.weight"
"""The tensor with Llama 3's scaling of rotary frequencies, which transformers does not read."""


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says of itself.

    Attributes:
        path: the file.
        metadata: its plain values by name; of lists of tokens and merges none.
        types: the types of its matrices, such as Q4_1, most frequent first.
        tensor_names: the names of its tensors.
        dequantized_bytes: the size of its weights in `dtype`.
    """

    path: Path
    metadata: dict[str, Any]
    types: Sequence[str]
    tensor_names: frozenset[str]
    dequantized_bytes: int

    @property
    def dtype(self) -> str:
        """The type of the dequantized weights, as torch names it: exact, so float32 for blocks."""
        return _dtype(self.types)

    @property
    def name_on_hub(self) -> str | None:
        """`org/name` of the model that the file says it was made from; None if it does not."""
        for key in ("general.base_model.0.repo_url", "general.source.url"):
            url = _HUB_URL.fullmatch(str(self.metadata.get(key, "")))
            if url is not None:
                return url[1]
        return None

    def check(self) -> None:
        """Refuses a file that is no whole language model.

        Raises:
            BaseModelError: it is a part of several files, an adapter, or a model whose rotary
                embedding transformers would not read.
        """
        kind = str(self.metadata.get("general.type", "model"))
        if kind != "model":
            raise BaseModelError(
                f"{self.path}: general.type: expected model, found {kind!r:.40}; name the file of "
                "the language model"
            )
        parts = self.metadata.get("split.count", 1)
        if parts > 1:
            raise BaseModelError(
                f"{self.path}: expected a whole model, found one of {parts} parts; join them with "
                "llama-gguf-split --merge"
            )
        architecture = self.metadata.get("general.architecture")
        scaling = self.metadata.get(f"{architecture}.rope.scaling.type", "none")
        if scaling != "none" or _ROTARY_FACTORS in self.tensor_names:
            raise BaseModelError(
                f"{self.path}: expected an unscaled rotary embedding, found a scaled one, which "
                "transformers does not read from GGUF; use the model's own folder as the base"
            )


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of the GGUF file at `path`.

    Raises:
        MissingPackageError: the package gguf is not installed.
        BaseModelError: the file is missing, damaged or cut off, or holds a type that the package
            does not know.
    """
    if not path.is_file():
        raise BaseModelError(f"{path}: no such file; base must be a model's folder or a GGUF file")
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as error:
        raise MissingPackageError(
            f"{path}: a GGUF file needs the package gguf ({error}); pip install 'scale-cpt[gguf]'"
        ) from None
    what = (
        f"{path}: cannot be read as GGUF: damaged, cut off, or of a type that this version of the "
        "package gguf does not know; copy it again, or pip install --upgrade gguf"
    )
    with faults_of_library(what, BaseModelError):
        reader = GGUFReader(path)
        metadata: dict[str, Any] = {}
        for name, field in reader.fields.items():
            if GGUFValueType.ARRAY not in field.types:
                metadata[name] = field.contents()
        matrices = [tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1]
        types = sorted(set(matrices), key=matrices.count, reverse=True)
        elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
        names = frozenset(str(tensor.name) for tensor in reader.tensors)
    if not types:
        raise BaseModelError(f"{path}: holds no matrices; name the file of a language model")
    element_bytes = 4 if _dtype(types) == "float32" else 2
    return GgufFile(path, metadata, types, names, elements * element_bytes)


def _dtype(types: Sequence[str]) -> str:
    found = {_UNQUANTIZED.get(name, "float32") for name in types}
    if len(found) == 1:
        return found.pop()
    return "float32"
