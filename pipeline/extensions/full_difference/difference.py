"""`--format difference`: a base, and in few bits how full fine-tuning changed it, for a model with
a gate.

With W a parameter of the base and W' the trained one, D = W' − W is stored for every parameter:

- matrices within layers in 4, 8 or 16 bits an element, with a scale for each group of columns
  (`hf.remote_code.packed_difference`);
- gains and biases in 16 bits;
- embedding and output in 16 bits, with a row for each frequent token, and one row that all other
  tokens share.

The folder holds the base's weights, too, and the code with which transformers adds D to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.conversion.merged import merged_export
from pipeline.errors import ConversionError, faults_of_library
from pipeline.hf.base_files import base_config, text_token_ids
from pipeline.hf.config import gate_to_config
from pipeline.hf.gate_tensors import gate_tensors
from pipeline.hf.remote_code.configuration_difference import NEEDED, DifferenceConfig
from pipeline.hf.remote_code.modeling_difference import (
    DifferenceForCausalLM,
    escaped,
    packed_modules,
)
from pipeline.hf.remote_code.packed_difference import (
    PackedMatrix,
    PackedRows,
    bits_of,
    packed,
)
from pipeline.hf.write import Export, PlannedTensor, code_files, dtype_name

_RENAMED = {"embed_out.weight": "lm_head.weight"}
"""By a tensor's name in the base's files, the parameter that transformers loads it into, where the
two differ: GPT-NeoX's output map."""


@dataclass(frozen=True)
class Packing:
    """How a difference is stored.

    Attributes:
        bits: the bits of an element of a matrix within layers: 4, 8 or 16.
        own_tokens: the ids whose rows of embedding and output are stored; None: all ids.
    """

    bits: int = 4
    own_tokens: tuple[int, ...] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What tells one packing from another, with a hash in place of up to 100,000 ids."""
        ids = hashlib.sha256(str(self.own_tokens).encode()).hexdigest()
        return {"bits": self.bits, "own_tokens": ids}


def difference_export(model: TrainedModel, dtype: torch.dtype, packing: Packing) -> Export:
    """The base, the packed difference of the trained model from it, and the gate.

    Raises:
        ConversionError: transformers has no such model of the base's class.
    """
    assert model.gate is not None, "checked before"
    vocab_size = model.spec.vocab_size
    own_tokens = packing.own_tokens
    if own_tokens is None:
        own_tokens = tuple(range(vocab_size))
    text_config = base_config(model.base.path) | {"dtype": dtype_name(dtype)}
    config: dict[str, Any] = {
        "architectures": [DifferenceForCausalLM.__name__],
        "auto_map": {
            "AutoConfig": "configuration_difference.DifferenceConfig",
            "AutoModelForCausalLM": "modeling_difference.DifferenceForCausalLM",
        },
        "model_type": DifferenceConfig.model_type,
        "text_config": text_config,
        "bits": packing.bits,
        "own_rows": len(own_tokens) + 1,
        "unpacked": "once",
        **gate_to_config(model.gate),
        "dtype": dtype_name(dtype),
        "transformers_version": NEEDED,
    }
    config |= text_token_ids(text_config)

    trained = _by_module_name(merged_export(model, dtype).tensors)
    base = _by_module_name(merged_export(replace(model, untrained=True), dtype).tensors)
    modules = _modules(config, model.base.path)
    if set(base) != set(modules):
        odd = sorted(set(base) ^ set(modules))
        raise ConversionError(
            f"{model.base.path}: --format difference: transformers' model of this base and its "
            f"folder differ in {odd[0]} and {len(odd) - 1} more; use --format merged "
            "--without-gate"
        )

    # The codes and the scales of a parameter are written one after the other: a cache of one
    # parameter computes both once, and holds no more than that.
    @lru_cache(maxsize=1)
    def tensors_of(name: str) -> Mapping[str, Tensor]:
        # W is rounded to the type in which it is stored. Then W + D differs from W' by the error of
        # D alone, and not also by the rounding of W.
        weight = base[name].make().to(dtype).float()
        difference = trained[name].make().float() - weight
        return _packed_tensors(modules[name], difference, own_tokens)

    tensors: list[PlannedTensor] = []
    for name, planned in base.items():
        tensors.append(replace(planned, name=f"base.{name}"))
    for name, module in modules.items():
        for part, like in module.named_buffers():
            path = f"difference.{escaped(name)}.{part}"
            make = partial(_part, tensors_of, name, part)
            tensors.append(PlannedTensor(path, tuple(like.shape), make, like.dtype))
    tensors += gate_tensors(model.gate, vocab_size)
    return Export("difference", config, tensors, dtype, code_files(DifferenceForCausalLM))


def _part(tensors_of: Any, name: str, part: str) -> Tensor:
    """One buffer of a packed parameter, such as its codes."""
    tensor: Tensor = tensors_of(name)[part]
    return tensor


def _by_module_name(tensors: Sequence[PlannedTensor]) -> dict[str, PlannedTensor]:
    """The tensors of a merged export, by the names of transformers' parameters."""
    named: dict[str, PlannedTensor] = {}
    for planned in tensors:
        named[_RENAMED.get(planned.name, planned.name)] = planned
    return named


def _modules(config: Mapping[str, Any], base: Path) -> dict[str, nn.Module]:
    """The module that stores the difference of each parameter of the base, by the parameter's name.

    They are on the meta device: only the names, shapes and types of their buffers are used.
    """
    with (
        faults_of_library(f"{base}: --format difference: transformers", ConversionError),
        torch.device("meta"),
    ):
        made = DifferenceConfig(**config)
        modules = packed_modules(AutoModelForCausalLM.from_config(made.text_config), made)
    # The names of submodules may have no dots: `escaped` writes slashes.
    return {name.replace("/", "."): module for name, module in modules.items()}


def _packed_tensors(
    module: nn.Module, difference: Tensor, own_tokens: Sequence[int]
) -> dict[str, Tensor]:
    """The values of a packed module's buffers."""
    if isinstance(module, PackedMatrix):
        codes, scales = packed(difference, module.bits)
        if scales is None:
            # 16 bits an element need no scales.
            return {"codes": codes}
        return {"codes": codes, "scales": scales}
    if not isinstance(module, PackedRows):
        # A gain or a bias.
        return {"codes": bits_of(difference)}
    own = torch.tensor(own_tokens)
    is_other = torch.ones(len(difference), dtype=torch.bool)
    is_other[own] = False
    # Of all rows that the other tokens could share, their mean has the smallest squared error.
    shared = difference.new_zeros(1, difference.shape[1])
    if is_other.any():
        shared = difference[is_other].mean(0, keepdim=True)
    row_of_token = torch.full((len(difference),), len(own), dtype=torch.int32)
    row_of_token[own] = torch.arange(len(own), dtype=torch.int32)
    codes = bits_of(torch.cat([difference[own], shared]))
    return {"codes": codes, "row_of_token": row_of_token}


def stored_sizes(export: Export) -> dict[str, Any]:
    """The sizes of a difference on disk, for conversion.json.

    `stored_x` is the size of base and difference together, as a multiple of the base in 16 bits.
    """
    base = 0
    difference = 0
    for tensor in export.tensors:
        if tensor.name.startswith("base."):
            base += prod(tensor.shape)
        else:
            difference += prod(tensor.shape) * (tensor.dtype or export.dtype).itemsize
    return {
        "bits": export.config["bits"],
        "own_rows": export.config["own_rows"],
        "base_parameters": base,
        "difference_bytes": difference,
        "stored_x": 1 + difference / (2 * base),
    }
