"""A pretrained model's Hugging Face folder: its safetensors files, their hashes, any slice of any base parameter.

No code from the folder is run: only safetensors and JSON are read. `hf_tensor` maps our parameter names to those of the
folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import BaseModelError
from pipeline.files import file_hash, in_threads, is_plain_name
from pipeline.model.new_rows import NewRows
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.sharding import REPLICATED, Partition, Rows, StoredTensor, read_shard
from pipeline.untrusted_files import read_object, require_regular

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_TYPES = ("F16", "BF16", "F32", "F64")
"""The types of weights, as safetensors names them; others are quantized, or no weights."""


@dataclass(frozen=True)
class BaseFolder:
    """The weights of a Hugging Face folder, read tensor by tensor and slice by slice.

    With `known_hashes` the method `hashes` reads no file. `new_rows`: the run extends its vocabulary by them.
    """

    path: Path
    spec: DecoderSpec
    known_hashes: Mapping[str, str] | None = field(default=None, compare=False)
    new_rows: NewRows | None = field(default=None, compare=False)

    @cached_property
    def file_of(self) -> dict[str, Path]:
        """The file of each of the folder's tensors.

        Raises:
            BaseModelError: a file is missing or damaged.
        """
        index = self.path / INDEX_FILE
        try:
            entries = read_object(index, BaseModelError, "copy the folder again").get("weight_map")
        except FileNotFoundError:
            only = self.path / SINGLE_FILE
            return dict.fromkeys(self._names_in(only), only)
        if not isinstance(entries, dict):
            raise BaseModelError(f"{index}: not an index of safetensors files; copy the folder again")
        if not all(isinstance(name, str) and is_plain_name(name) for name in entries.values()):
            raise BaseModelError(f"{index}: names files outside its folder; do not use this model")
        held = {name: set(self._names_in(self.path / name)) for name in sorted(set(entries.values()))}
        for tensor, name in entries.items():
            if tensor not in held[name]:
                raise BaseModelError(
                    f"{self.path / name}: lacks {tensor}, which the index lists; copy the folder again"
                )
        return {tensor: self.path / name for tensor, name in entries.items()}

    def _names_in(self, file: Path) -> list[str]:
        try:
            require_regular(file, BaseModelError, "copy the file again")
            with safe_open(file, framework="pt") as tensors:
                return list(tensors.keys())
        except FileNotFoundError:
            raise BaseModelError(f"{file}: no such file; a base model needs its weights as safetensors") from None
        except (SafetensorError, OSError, MemoryError) as error:
            raise BaseModelError(f"{file}: damaged ({error}); copy the file again") from None

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted."""
        return sorted(set(self.file_of.values()))

    def hashes(self) -> dict[str, str]:
        """The SHA-256 of every weight file, by file name: the identity of a base."""
        return dict(self.known_hashes if self.known_hashes is not None else self._hashes)

    @cached_property
    def _hashes(self) -> dict[str, str]:
        return dict(zip([file.name for file in self.files], in_threads(file_hash, self.files), strict=True))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that the base was published in."""
        return self.read("final_norm.base.weight").dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The unsharded shape of the base parameter `name` (ours), from its file's header.

        Raises:
            BaseModelError: it is missing, or its file damaged.
        """
        source, file = self._source(name)
        with self._slice(file, source.name) as view:
            rows, *others = view.get_shape()
        # Query, key and value have a third of a fused tensor's rows each. `load_base` refuses other row counts.
        return (rows if source.fused_part is None or rows % 3 else rows // 3, *others)

    def read(
        self,
        name: str,
        partition: Partition = REPLICATED,
        tp_rank: int = 0,
        tp_size: int = 1,
        rows: Rows | None = None,
    ) -> Tensor:
        """The shard of the base parameter `name` (ours) that `tp_rank` holds, or `rows` of it; reads nothing else.

        Raises:
            BaseModelError: it is missing, or its file damaged.
        """
        source, file = self._source(name)
        with self._slice(file, source.name) as view:
            if source.fused_part is not None:
                return self._fused(view, source.fused_part, partition, tp_rank, tp_size, rows)
            stored = read_shard(view, partition, tp_rank, tp_size, rows)
        # Rows that are channels of the residual stream are never split over ranks, so rows[0] is the first channel.
        return self.spec.residual.restore(name, stored, rows[0] if rows else 0) if self.spec.residual else stored

    def _source(self, name: str) -> tuple[HfTensor, Path]:
        """The tensor and file of the base parameter `name`; a tied output may be stored as the embedding only."""
        source = hf_tensor(name, self.spec)
        if source.name in self.file_of:
            return source, self.file_of[source.name]
        if name == "output.base" and self.spec.tie_word_embeddings:
            return self._source("embedding.base.weight")
        raise BaseModelError(f"{self.path}: lacks the tensor {source.name}; the weights do not fit config.json")

    @contextmanager
    def _slice(self, file: Path, tensor: str) -> Iterator[StoredTensor]:
        try:
            with safe_open(file, framework="pt") as tensors:
                view = tensors.get_slice(tensor)
                if not view.get_shape() or view.get_dtype() not in _TYPES:
                    raise BaseModelError(
                        f"{file}: {tensor} has shape {view.get_shape()} and type {view.get_dtype()}; expected a weight "
                        f"in one of {', '.join(_TYPES)}: use the original model"
                    )
                yield view
        except (SafetensorError, OSError, MemoryError) as error:
            raise BaseModelError(f"{file}: damaged ({error}); copy the file again") from None

    def _fused(
        self, view: StoredTensor, part: int, partition: Partition, tp_rank: int, tp_size: int, rows: Rows | None
    ) -> Tensor:
        """One part (query, key or value) of a fused tensor with rows [heads, 3, head_dim]."""
        heads, head_dim = self.spec.widths.num_attention_heads, self.spec.head_dim
        above, below = partition.bounds(heads, tp_rank, tp_size) if partition.dim == 0 else (0, heads)
        first, stop = rows or (0, (below - above) * head_dim)
        first_head, stop_head = first // head_dim, -(-stop // head_dim)
        fused = view[(above + first_head) * 3 * head_dim : (above + stop_head) * 3 * head_dim]
        of_part = fused.unflatten(0, (stop_head - first_head, 3, head_dim))[:, part].flatten(0, 1)
        return of_part[first - first_head * head_dim : stop - first_head * head_dim].contiguous()


_LLAMA = {
    "embedding.base": "model.embed_tokens",
    "final_norm.base": "model.norm",
    "output.base": "lm_head",
}
_LLAMA_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_GPT_NEOX = {
    "embedding.base": "gpt_neox.embed_in",
    "final_norm.base": "gpt_neox.final_layer_norm",
    "output.base": "embed_out",
}
_GPT_NEOX_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "attention.query_key_value",
    "attention.key": "attention.query_key_value",
    "attention.value": "attention.query_key_value",
    "attention.output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn.up": "mlp.dense_h_to_4h",
    "ffn.down": "mlp.dense_4h_to_h",
}
FUSED_PARTS = ("attention.query", "attention.key", "attention.value")


@dataclass(frozen=True)
class HfTensor:
    """A tensor in a Hugging Face folder.

    `fused_part` is the index of query, key or value in a fused tensor with rows [heads, 3, head_dim].
    """

    name: str
    fused_part: int | None = None


def hf_tensor(name: str, spec: DecoderSpec) -> HfTensor:
    """The tensor of a Hugging Face folder that holds the base parameter `name` (ours)."""
    outside_layers = _LLAMA if spec.family == "llama" else _GPT_NEOX
    if name == "output.base":
        return HfTensor(f"{outside_layers[name]}.weight")
    stem, kind = name.rsplit(".", 1)
    if stem in outside_layers:
        return HfTensor(f"{outside_layers[stem]}.{kind}")
    _, index, module = stem.removesuffix(".base").split(".", 2)
    if spec.family == "llama":
        return HfTensor(f"model.layers.{index}.{_LLAMA_LAYER[module]}.{kind}")
    part = FUSED_PARTS.index(module) if module in FUSED_PARTS else None
    return HfTensor(f"gpt_neox.layers.{index}.{_GPT_NEOX_LAYER[module]}.{kind}", part)
