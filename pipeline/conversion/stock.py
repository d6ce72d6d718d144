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

Norms after attention and FFN (EXAONE 4) leave the new part scaled by s: their gains are times √(D / D') only, and the
maps that read the stream, with no norm before them, are times 1 / s in the new columns. A norm of each query and key
head shares eps, so these maps are times √(D / D') in fp32; in 16 bits rounding them would cost more than that eps.

If the base was widened before, the channels added then are stored in the same way. config.json says which channels are
scaled, and s, so that training can undo it (`pipeline.model.spec.StoredResidual`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pipeline import log
from pipeline.conversion.hf_folder import Export, PlannedTensor, base_config, dtype_name
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.model.families import family_of, hf_tensor
from pipeline.model.family import FusedPart, fuse, map_rows
from pipeline.model.from_hf import RESIDUAL_KEY, is_base
from pipeline.model.spec import StoredResidual, scale_in
from pipeline.model.stock_model import UNPADDED, Padding, stock_widths
from pipeline.scale.plan import Widths

_logger = log.get_logger(__name__)
_NORMS_OF_HEADS = ("attention.query_norm", "attention.key_norm")
# Row and column of each added block in the fused matrix (SCALE, Eq. 1); `expansion` is the embedding's and
# the output's.
_BLOCK_POSITIONS = {
    "expansion_to_base": (0, 1),
    "base_to_expansion": (1, 0),
    "expansion_to_expansion": (1, 1),
    "expansion": (0, 1),
}


def stock_export(model: TrainedModel, dtype: torch.dtype, padding: Padding = UNPADDED) -> Export:
    """Any model without an expansion; Preserve and Adapt trained with `norm: base`, where the base's family allows.

    `padding`: for servers that split it; a model without an expansion has the base's widths, and takes none.

    Raises:
        ConversionError: padding of a model without an expansion.
    """
    if model.plan is None:
        if padding != UNPADDED:
            raise ConversionError(f"{model.checkpoint}: --pad-for: nothing was added to the widths; leave it out")
        return _unwidened_export(model, dtype)
    widths, wider = model.spec.widths, stock_widths(model.plan.expansion, model.spec, padding)
    if padding != UNPADDED:
        _logger.info("padded: %s instead of %s", wider, stock_widths(model.plan.expansion, model.spec))
    hidden_size = wider.hidden_size
    new = StoredResidual(widths.hidden_size, scale_in(dtype), model.spec.norm_placement == "after")
    residual = _kept(model.spec.residual, dtype) or new
    config = base_config(model.base.path) | {
        "vocab_size": model.spec.vocab_size,
        **asdict(wider),
        "head_dim": model.spec.head_dim,
        "rms_norm_eps": model.spec.norm_eps * widths.hidden_size / hidden_size,
        # The embedding's new columns are scaled and the output's are not: they cannot be tied.
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
        RESIDUAL_KEY: asdict(residual),
    }
    fusion = _Fusion(model, wider, residual, dtype)
    names = dict.fromkeys([*filter(is_base, model.shapes), "output.base"])
    return Export("stock", config, _stored(model, [(name, fusion.tensor(name)) for name in names]), dtype)


def _stored(model: TrainedModel, tensors: Iterable[tuple[str, PlannedTensor]]) -> list[PlannedTensor]:
    """The tensors as the base's folder names and fuses them; given are those of our base parameters, by name."""
    held: dict[str, list[tuple[FusedPart | None, PlannedTensor]]] = {}
    for name, planned in tensors:
        target = hf_tensor(name, model.spec)
        held.setdefault(target.name, []).append((target.part, planned))

    def stored_as(target: str, parts: list[tuple[FusedPart | None, PlannedTensor]]) -> PlannedTensor:
        part, first = parts[0]
        if part is None:
            return replace(first, name=target)
        in_order = [planned for _, planned in sorted(parts, key=lambda pair: pair[0].index if pair[0] else 0)]
        shape = (sum(planned.shape[0] for planned in in_order), *first.shape[1:])
        return PlannedTensor(target, shape, lambda: fuse([planned.make() for planned in in_order], part.groups))

    return [stored_as(target, parts) for target, parts in held.items()]


@dataclass(frozen=True)
class _Fusion:
    """Plans each tensor of the ordinary model from the blocks that it is made of."""

    model: TrainedModel
    widths: Widths
    residual: StoredResidual
    dtype: torch.dtype

    def tensor(self, name: str) -> PlannedTensor:
        """The base parameter `name` with its expansion blocks."""
        stem, _, kind = name.partition(".base")
        shapes = self.model.shapes
        # A tied output projection has no shape of its own.
        base_shape = shapes.get(name, shapes["embedding.base.weight"])
        corners = {name: (0,) * len(base_shape)}
        for block, position in _BLOCK_POSITIONS.items():
            block_name = f"{stem}.{block}{kind}"
            if block_name in shapes:
                offsets = position if len(base_shape) == 2 else (1,)  # in a bias or gain, what is added comes second
                corner = tuple(size * offset for size, offset in zip(base_shape, offsets, strict=True))
                corners[block_name] = corner
        shape = self._shape(stem.rpartition("layers.")[2].partition(".")[2] or stem, base_shape)
        return PlannedTensor(name, shape, partial(self._fuse, name, shape, corners))

    def _shape(self, module: str, base_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a parameter of `module` in the ordinary model."""
        if module.endswith(_NORMS_OF_HEADS):
            return base_shape
        widths = self.widths
        rows = map_rows(widths, self.model.spec.head_dim)
        columns = {"attention.output": rows["attention.query"], "ffn.down": widths.intermediate_size}
        vocabulary = base_shape[0] if module in ("embedding", "output") else widths.hidden_size
        shape = (rows.get(module, vocabulary), columns.get(module, widths.hidden_size))
        return shape[: len(base_shape)]

    def _fuse(self, name: str, shape: Sequence[int], corners: dict[str, tuple[int, ...]]) -> Tensor:
        """Zeros of `shape` with each block at its corner, scaled as it is stored."""
        fused, stem = torch.zeros(*shape, dtype=self.dtype), name.partition(".base")[0]
        for block_name, corner in corners.items():
            block = self.model.read(block_name)
            if self._takes_root(stem):
                block = block.float() * math.sqrt(self.model.spec.widths.hidden_size / self.widths.hidden_size)
            fused[tuple(slice(start, start + size) for start, size in zip(corner, block.shape, strict=True))] = block
        return self.residual.store(name, fused)

    def _takes_root(self, stem: str) -> bool:
        """Whether the weights of `stem` are times √(D / D')."""
        if self.model.spec.query_key_norm == "head" and stem.endswith(("attention.query", "attention.key")):
            return self.dtype == torch.float32
        return stem.endswith("norm") and not stem.endswith(_NORMS_OF_HEADS)


def _unwidened_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """The base's own tensors, with the layers that were added; adapters are merged: W + s B A in fp32."""
    config = base_config(model.base.path) | {
        "vocab_size": model.spec.vocab_size,
        "num_hidden_layers": model.spec.num_layers,
        "tie_word_embeddings": model.spec.tie_word_embeddings,
        "dtype": dtype_name(dtype),
    }
    if model.spec.layers != model.base.spec.layers:
        config |= family_of(model.spec).layer_entries(model.spec)
    residual = _kept(model.spec.residual, dtype)
    if residual is not None:
        config[RESIDUAL_KEY] = asdict(residual)

    def values(name: str) -> Tensor:
        weight, path = model.read(name), name.removesuffix("base.weight") + "adapter"
        if path in model.adapters:
            weight = weight.float() + model.adapters[path].scale * (model.read(f"{path}.b") @ model.read(f"{path}.a"))
        return weight if residual is None else residual.store(name, weight.clone())

    names = filter(is_base, model.shapes)
    tensors = [(name, PlannedTensor(name, model.shapes[name], partial(values, name))) for name in names]
    return Export("stock", config, _stored(model, tensors), dtype)


def _kept(residual: StoredResidual | None, dtype: torch.dtype) -> StoredResidual | None:
    """How an export in `dtype` stores the residual stream of a base that stores it so.

    A smaller scale than the base's own would change what its norms compute.
    """
    return None if residual is None else replace(residual, scale=max(residual.scale, scale_in(dtype)))
