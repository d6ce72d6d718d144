"""`--format peft`: the trained factors of LoRA, as an adapter that PEFT and vLLM load.

A folder of PEFT names the modules of transformers. Our decoder has a module for each linear map,
and some families of transformers fuse several maps into one module: query, key and value of Phi-3
and GPT-NeoX. The adapter of such a module has the factors of all its maps beside each other, which
is exact:

    A = [A_1; A_2; ...]                   [n * rank, in]
    B = diag(B_1, B_2, ...)               [out, n * rank], its rows in the order of the module's

PEFT multiplies B A by lora_alpha / r. For such a module both are n times as large (rank_pattern,
alpha_pattern), so that the factor is the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import Lora, Method
from pipeline.errors import ConversionError, faults_of_library
from pipeline.files.json_files import read_object, write_json
from pipeline.hf.base_files import copy_terms
from pipeline.hf.load import load_hf_model
from pipeline.hf.write import Export, PlannedTensor
from pipeline.model.bases import kind_of
from pipeline.model.families import FusedPart, HfTensor
from pipeline.model.spec import DecoderSpec

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""How PEFT's names of tensors begin; the name of transformers' module follows."""
_A = ".lora_A.weight"
_B = ".lora_B.weight"

_Part = tuple[FusedPart | None, str]
"""An adapter: the rows of a module that it changes (None: all), and its path in our decoder."""


def adapter_unsupported_reason(settings: Method, spec: DecoderSpec, *, gated: bool) -> str | None:
    """Why a trained model cannot be exported as an adapter of its base; None if it can."""
    if not isinstance(settings, Lora):
        return f"method {settings.name} trains no adapters"
    if settings.has_open_weights:
        return "open rows and gains are not part of an adapter"
    if settings.open_first_layer > 0:
        return "PEFT takes adapters to be in every layer (open_first_layer leaves some out)"
    if gated:
        return "a gate decides for each token (--without-gate leaves it out)"
    if spec.new_tokens > 0:
        return "the rows of an extended vocabulary are not part of an adapter"
    if spec.mixture is not None:
        return "in a mixture of experts PEFT takes the names of our maps for those of experts too"
    if spec.residual is not None:
        return "the base stores the channels that widened it at another scale than A and B assume"
    return None


def adapter_export(model: TrainedModel, dtype: torch.dtype, base_name: str | None) -> Export:
    """The adapters of a run of method lora, as PEFT names them.

    Args:
        model: the trained model.
        dtype: the type of the stored factors.
        base_name: the base's name on the hub, if it has one.
    """
    settings = model.settings
    assert isinstance(settings, Lora), "adapter_unsupported_reason was asked before"
    # By module of transformers, our adapters of the maps that it holds: of one map, or of several
    # that it fuses.
    modules: dict[HfTensor, list[_Part]] = {}
    for path in model.adapters:
        target = kind_of(model.spec).adapted_tensor(path, model.spec)
        modules.setdefault(replace(target, part=None), []).append((target.part, path))

    tensors: list[PlannedTensor] = []
    ranks: dict[str, int] = {}
    for target, parts in modules.items():
        module = target.name.removesuffix(".weight")
        count = len(parts)
        if count > 1:
            ranks[module] = count * settings.rank
        in_features = model.shapes[f"{parts[0][1]}.a"][1]
        out_features = _out_features(model, parts)
        shape_of_a = (count * settings.rank, in_features)
        shape_of_b = (out_features, count * settings.rank)
        tensors.append(
            PlannedTensor(f"{_PREFIX}{module}{_A}", shape_of_a, partial(_factor_a, model, parts))
        )
        tensors.append(
            PlannedTensor(f"{_PREFIX}{module}{_B}", shape_of_b, partial(_factor_b, model, parts))
        )

    alphas: dict[str, float] = {}
    for module, rank in ranks.items():
        alphas[module] = settings.scale * rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": settings.rank,
        "lora_alpha": settings.scale * settings.rank,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": _target_modules(list(modules), model.spec),
        "bias": "none",
        "lora_dropout": 0.0,
        # GPT-2's Conv1D stores its weights transposed: PEFT sees that by the module's class, and
        # corrects this entry itself.
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }
    return Export("peft", config, tensors, dtype)


def _target_modules(targets: list[HfTensor], spec: DecoderSpec) -> list[str]:
    """The entry target_modules of adapter_config.json.

    PEFT compares each entry with the whole name of a module, and with the end of its name.
    """
    names: set[str] = set()
    for target in targets:
        module = target.name.removesuffix(".weight")
        if spec.is_native:
            # The last name: in a native family each module of that name has an adapter.
            module = module.rpartition(".")[2]
        # Other bases may have more modules of the same last name: there the whole name is kept.
        names.add(module)
    return sorted(names)


def _out_features(model: TrainedModel, parts: list[_Part]) -> int:
    """The rows of the module, with those of fused maps that have no adapter."""
    part, path = parts[0]
    if part is not None:
        return part.groups * part.group_rows
    return model.shapes[f"{path}.b"][0]


def _factor_a(model: TrainedModel, parts: list[_Part]) -> Tensor:
    """[n * rank, in]: A of each map of a module, one below the other."""
    return torch.cat([model.read(f"{path}.a") for _, path in parts])


def _factor_b(model: TrainedModel, parts: list[_Part]) -> Tensor:
    """[out, n * rank]: B of each map in the rows of that map, and in the columns of its A."""
    first_part, first_path = parts[0]
    if first_part is None:
        return model.read(f"{first_path}.b")
    rank = model.shapes[f"{first_path}.a"][0]
    # Rows of the module are in groups: GPT-NeoX has query, key and value of a head beside each
    # other, a group for each head. Phi-3 has one group. Each map has the same rows in every group.
    grouped = torch.zeros(first_part.groups, first_part.group_rows, len(parts) * rank)
    for place, (part, path) in enumerate(parts):
        assert part is not None, "all parts of a fused matrix are parts"
        rows = slice(part.first, part.first + part.rows)
        columns = slice(place * rank, (place + 1) * rank)
        grouped[:, rows, columns] = model.read(f"{path}.b").unflatten(0, (part.groups, -1))
    return grouped.flatten(0, 1)


def write_adapter(folder: Path, export: Export, base: Path) -> None:
    """Writes the adapter into the existing `folder`, with the files of the base's terms of use."""
    tensors: dict[str, Tensor] = {}
    for planned in export.tensors:
        tensors[planned.name] = planned.make().to(export.dtype).contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    copy_terms(folder, base)
    write_json(folder / ADAPTER_CONFIG, export.config)


def load_with_adapter(base: Path, folder: Path, dtype: torch.dtype) -> Any:
    """The base as transformers loads it, with the adapter of `folder` as PEFT computes it.

    PEFT itself is not needed: exports are verified where it is not installed.

    Raises:
        ConversionError: a file of the adapter is damaged, or names a module that the base lacks.
    """
    config = read_object(folder / ADAPTER_CONFIG, ConversionError)
    weights = folder / ADAPTER_WEIGHTS
    with faults_of_library(f"{weights}: damaged", ConversionError):
        tensors = load_file(weights)
    model = load_hf_model(base, dtype)
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if not name.endswith(_A):
            continue
        path = name.removeprefix(_PREFIX).removesuffix(_A)
        if path not in modules:
            raise ConversionError(f"{weights}: {path} is no module of {base}")
        rank = config["rank_pattern"].get(path, config["r"])
        alpha = config["alpha_pattern"].get(path, config["lora_alpha"])
        b = tensors[f"{_PREFIX}{path}{_B}"]
        add = partial(_add_change, a.to(dtype), b.to(dtype), alpha / rank)
        modules[path].register_forward_hook(add)
    return model


def _add_change(
    a: Tensor, b: Tensor, scale: float, module: nn.Module, inputs: tuple[Tensor], output: Tensor
) -> Tensor:
    """W x + s B A x. inputs: (x: [..., in],), output: [..., out]."""
    (x,) = inputs
    return output + scale * F.linear(F.linear(x, a), b)
