"""`--format stock`: a model of the base's own class, which any server loads with no code of ours.

Without an expansion it has the base's tensors: full fine-tuning and Freeze change their values, LLaMA Pro adds layers,
LoRA's adapters are merged. With one, it is an ordinary wider model: the four blocks of a linear map fuse into one
matrix. That leaves the norm: with `norm: base` both streams are divided by the root mean square of `x` alone, while an
ordinary RMSNorm takes it over the whole residual stream. So the new part of that stream is stored scaled by a power of
two s (which is exact), small enough to vanish in the mean square, and the gains undo it. With D the base's width and D'
the whole:

    what writes x_up (embedding, output and down maps)   times s
    gains   base: times √(D / D')    expansion: times √(D / D') / s
    eps     times D / D'

If the base was widened before, the channels added then are stored in the same way. config.json says which channels are
scaled, and s, so that training can undo it (`pipeline.model.spec.StoredResidual`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pipeline.conversion.hf_folder import Export, PlannedTensor, base_config, dtype_name
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.model.base_folder import hf_tensor
from pipeline.model.from_hf import RESIDUAL_KEY, is_base
from pipeline.model.spec import DecoderSpec, StoredResidual, scale_in
from pipeline.scale.plan import ExpansionPlan

_WRITES_RESIDUAL = ("attention.output", "ffn.down")
# Row and column of each added block in the fused matrix (SCALE, Eq. 1); `expansion` is the embedding's and
# the output's.
_BLOCK_POSITIONS = {
    "expansion_to_base": (0, 1),
    "base_to_expansion": (1, 0),
    "expansion_to_expansion": (1, 1),
    "expansion": (0, 1),
}


def stock_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """Any model without an expansion; Preserve and Adapt on a base of the Llama family, trained with `norm: base`.

    Raises:
        ConversionError: the model is of another kind; the message gives the reason.
    """
    if model.plan is None:
        return _unwidened_export(model, dtype)
    if reason := why_not_stock(model):
        raise ConversionError(f"{model.checkpoint}: --format stock cannot express {reason}; use --format scale")
    widths, added = model.spec.widths, model.plan.expansion
    heads = widths.num_attention_heads + added.num_attention_heads
    hidden_size = stock_hidden_size(widths.hidden_size + added.hidden_size, heads)
    residual = StoredResidual(model.spec.normed_size or widths.hidden_size, scale_in(dtype))
    config = base_config(model.base.path) | {
        "vocab_size": model.spec.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": widths.intermediate_size + added.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": widths.num_key_value_heads + added.num_key_value_heads,
        "head_dim": model.spec.head_dim,
        "rms_norm_eps": model.spec.norm_eps * widths.hidden_size / hidden_size,
        # The embedding's new columns are scaled and the output's are not: they cannot be tied.
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
        RESIDUAL_KEY: asdict(residual),
    }
    fusion = _Fusion(model, hidden_size, residual, dtype)
    names = dict.fromkeys([*filter(is_base, model.shapes), "output.base"])
    return Export("stock", config, [fusion.tensor(name) for name in names], dtype)


def why_not_stock(model: TrainedModel) -> str | None:
    """Why a model is not expressible as an ordinary one; None if it is."""
    return why_not_stock_of(model.plan, model.spec, gated=model.gate is not None)


def why_not_stock_of(plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool) -> str | None:
    """Why a model of that plan on a base of that architecture is not expressible as an ordinary one."""
    if plan is None:
        return None
    if gated:
        return "a gate, which decides for each token (without the section gate the run is converted ungated)"
    if spec.family != "llama":
        return (
            "a GPT-NeoX base: its LayerNorm takes one mean over the residual stream, and its head size follows from it"
        )
    if plan.routed:
        return "variant route: no ordinary model runs two paths"
    if plan.norm != "base":
        return "method.norm separate: an ordinary RMSNorm takes one mean square for both streams (norm: base allows it)"
    return None


def stock_hidden_size(hidden_size: int, heads: int) -> int:
    """The next width that `heads` divides, as transformers requires; the channels that this adds are zero."""
    return -(-hidden_size // heads) * heads


@dataclass(frozen=True)
class _Fusion:
    """Plans each tensor of the ordinary model from the blocks that it is made of."""

    model: TrainedModel
    hidden_size: int
    residual: StoredResidual
    dtype: torch.dtype

    def tensor(self, name: str) -> PlannedTensor:
        """The tensor that holds the base parameter `name` and its expansion blocks."""
        stem, _, kind = name.partition(".base")
        shapes = self.model.shapes
        # A tied output projection has no shape of its own.
        base_shape = shapes.get(name, shapes["embedding.base.weight"])
        shape, corners = list(base_shape), {name: (0,) * len(base_shape)}
        for block, position in _BLOCK_POSITIONS.items():
            block_name = f"{stem}.{block}{kind}"
            if block_name in shapes:
                offsets = position if len(base_shape) == 2 else (1,)  # in a bias or gain, what is added comes second
                corner = tuple(size * offset for size, offset in zip(base_shape, offsets, strict=True))
                ends = [start + size for start, size in zip(corner, shapes[block_name], strict=True)]
                shape = list(map(max, shape, ends))
                corners[block_name] = corner
        if stem.endswith(_WRITES_RESIDUAL):
            shape[0] = self.hidden_size
        elif kind != ".bias":
            shape[-1] = self.hidden_size
        target = hf_tensor(name, self.model.spec).name
        return PlannedTensor(target, tuple(shape), partial(self._fuse, name, shape, corners))

    def _fuse(self, name: str, shape: Sequence[int], corners: dict[str, tuple[int, ...]]) -> Tensor:
        """Zeros of `shape` with each block at its corner, scaled as it is stored."""
        fused = torch.zeros(*shape, dtype=self.dtype)
        for block_name, corner in corners.items():
            block = self.model.read(block_name)
            if block_name.endswith(("norm.base.weight", "norm.expansion.weight")):
                block = block.float() * math.sqrt(self.model.spec.widths.hidden_size / self.hidden_size)
            fused[tuple(slice(start, start + size) for start, size in zip(corner, block.shape, strict=True))] = block
        return self.residual.store(name, fused)


def _unwidened_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """The base's own tensors; GPT-NeoX's query, key and value are fused again."""
    config = base_config(model.base.path) | {
        "vocab_size": model.spec.vocab_size,
        "num_hidden_layers": model.spec.num_layers,
        "tie_word_embeddings": model.spec.tie_word_embeddings,
        "dtype": dtype_name(dtype),
    }
    if "layer_types" in config:  # one entry a layer; the supported bases have one type only
        config["layer_types"] = config["layer_types"][:1] * model.spec.num_layers
    residual = model.spec.residual
    if residual is not None:
        residual = replace(residual, scale=scale_in(dtype))
        config[RESIDUAL_KEY] = asdict(residual)
    sources: dict[str, list[str]] = {}
    for name in filter(is_base, model.shapes):
        # A model lists query, key and value in the order in which they are fused.
        sources.setdefault(hf_tensor(name, model.spec).name, []).append(name)
    tensors = []
    for target, names in sources.items():
        rows, *columns = model.shapes[names[0]]
        make = partial(_unwidened_values, model, names, residual)
        tensors.append(PlannedTensor(target, (rows * len(names), *columns), make))
    return Export("stock", config, tensors, dtype)


def _unwidened_values(model: TrainedModel, names: Sequence[str], residual: StoredResidual | None) -> Tensor:
    if len(names) > 1:  # laid out as [heads, 3, head_dim, ...]
        heads = model.spec.widths.num_attention_heads
        parts = [_with_adapter(model, name).unflatten(0, (heads, -1)) for name in names]
        return torch.stack(parts, dim=1).flatten(0, 2)
    values = _with_adapter(model, names[0])
    return values if residual is None else residual.store(names[0], values.clone())


def _with_adapter(model: TrainedModel, name: str) -> Tensor:
    """The base parameter `name`; if it has an adapter, W + s B A in fp32."""
    weight, path = model.read(name), name.removesuffix("base.weight") + "adapter"
    if path not in model.adapters:
        return weight
    return weight.float() + model.adapters[path].scale * (model.read(f"{path}.b") @ model.read(f"{path}.a"))
