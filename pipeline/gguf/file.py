"""Reads what a GGUF file says of its model, and refuses those from which no base can be made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import BaseModelError, MissingPackageError, faults_of_library

SUFFIX = ".gguf"
_UNQUANTIZED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HUB_URL = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?")
_ROTARY_FACTORS = ("rope_freqs.", "rope_factors_")
"""How the names of tensors begin that scale rotary frequencies: Llama 3's, and Phi-3's of LongRoPE.
transformers reads neither."""
_ROTARY_SCALING = (".rope.scaling.", ".rope.scale_linear")
"""What the entries contain that scale the rotary embedding; the second is the older name."""


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says of itself.

    Attributes:
        path: the file.
        metadata: its plain values by name; of lists of tokens and merges none.
        types: the types of its matrices, such as Q4_1, most frequent first.
        sizes: the elements of each tensor, by its name.
    """

    path: Path
    metadata: dict[str, Any]
    types: Sequence[str]
    sizes: Mapping[str, int]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of its architecture, with which the names of its values begin."""
        return str(self.metadata.get("general.architecture"))

    @property
    def dtype(self) -> str:
        """The type of the dequantized weights, as torch names it.

        Matrices keep their values exactly, so blocks become float32. llama.cpp writes norms and
        biases in float32: beside matrices of 16 bits they are rounded, because a folder has one
        type, and float32 would double it for a few vectors.
        """
        found = {_UNQUANTIZED.get(name, "float32") for name in self.types}
        return found.pop() if len(found) == 1 else "float32"

    def value(self, name: str, default: Any = None) -> Any:
        """The value `name` of its architecture, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def count_elements(self) -> int:
        """The elements of its tensors, without layers for predicting several tokens (MTP), which
        are not read."""
        added = self.value("nextn_predict_layers", 0)
        last = self.value("block_count", 0)
        unread = tuple(f"blk.{number}." for number in range(last - added, last))
        return sum(size for name, size in self.sizes.items() if not name.startswith(unread))

    @property
    def dequantized_bytes(self) -> int:
        """The size of its weights in `dtype`."""
        return sum(self.sizes.values()) * (4 if self.dtype == "float32" else 2)

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
                embedding or window transformers would not read.
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
        self._check_rotary_embedding()
        if self.architecture == "phi3":
            self._check_phi3()

    def _check_rotary_embedding(self) -> None:
        found = [name for name in self.sizes if name.startswith(_ROTARY_FACTORS)]
        for key, value in self.metadata.items():
            if any(part in key for part in _ROTARY_SCALING) and not self._is_unscaled(key, value):
                found.append(f"{key} {value!r:.40}")
        if found:
            raise BaseModelError(
                f"{self.path}: expected an unscaled rotary embedding, found a scaled one "
                f"({found[0]}), which transformers does not read from GGUF; use the model's own "
                "folder as the base"
            )

    def _is_unscaled(self, key: str, value: Any) -> bool:
        """Whether the entry `key`, of a scaling, leaves the rotary embedding as it is."""
        name = key.rpartition(".")[2]
        if name == "original_context_length":
            # Phi-4, which is not scaled, has it too.
            return (
                value == self.value("context_length") or self.value("rope.scaling.type") == "none"
            )
        if name in ("factor", "scale_linear"):
            return value in (0, 1)  # llama.cpp takes 0 as 1
        return name == "finetuned" or (name, value) in (("type", "none"), ("attn_factor", 1))

    def _check_phi3(self) -> None:
        """Refuses what transformers leaves out of a Phi-3.

        Raises:
            BaseModelError: a part of each head is not rotated, or the window is shorter than the
                context.
        """
        size, heads, rotated, window, context = (
            self.value(name, 0)
            for name in (
                "embedding_length",
                "attention.head_count",
                "rope.dimension_count",
                "attention.sliding_window",
                "context_length",
            )
        )
        if rotated and rotated * heads != size:
            raise BaseModelError(
                f"{self.path}: phi3.rope.dimension_count: expected the size of a head, "
                f"{size} / {heads}, found {rotated}, which transformers does not read from GGUF; "
                "use the model's own folder as the base"
            )
        if 0 < window < context:
            raise BaseModelError(
                f"{self.path}: phi3.attention.sliding_window: expected none, or the context's "
                f"{context} positions, found {window}, which transformers does not read from GGUF; "
                "use the model's own folder as the base"
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
        sizes = {str(tensor.name): int(tensor.n_elements) for tensor in reader.tensors}
    if not types:
        raise BaseModelError(f"{path}: holds no matrices; name the file of a language model")
    return GgufFile(path, metadata, types, sizes)
