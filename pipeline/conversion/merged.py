"""`--format merged`: a model of the base's own class, which any server loads with no code of ours.

**Without an expansion** it has the base's tensors: full fine-tuning and Freeze change their values,
LLaMA Pro adds layers, and LoRA's adapters are merged. Weights that only open tokens read are added
to the base's weights, so that every token counts as open, as in training. Own rows of embedding and
output are two matrices: the two are then no longer tied.

**With an expansion** it is an ordinary wider model: the four blocks of a linear map become one
matrix. The norms differ, however. With `norm: base` both streams are divided by the root mean
square of `x` alone, while an ordinary RMSNorm takes it over the whole residual stream. So the added
part of that stream is stored times a power of two s, which is exact. s is so small that the added
part vanishes in the mean square, and the gains undo it. Other tools cannot train weights that are
as small as for serving in fp32: for training s is larger. With D the base's width and D' the whole:

    what writes x_up (embedding, output and down maps)   times s
    gains   base: times √(D / D')    expansion: times √(D / D') / s
    eps     times D / D'

Norms after attention and FFN (EXAONE 4) leave the added part scaled by s: their gains are times
√(D / D') only, and the maps that read the stream, with no norm before them, are times 1 / s in the
added columns. The norms of query and key heads have the same eps, which config.json holds once and
which is times D / D' here. So in fp32 the maps before them are times √(D / D'), which gives the
same result; in 16 bits the rounding of these maps would cost more than the wrong eps does.

In a mixture with a shared expert (GLM-4-MoE) the expansion's FFN becomes more inner width of that
expert, which every token takes. The router and the other experts read no added channel. W21 reads
the sum of all experts. As it is linear, each expert can write its own part of W21's result: the
rows W21 W are added below its down map W. The shared expert's width must be a multiple of an
expert's; zeros fill it up.

If the base was widened before, the channels added then are stored in the same way. config.json says
which channels are scaled, and s, so that training can undo it
(`pipeline.model.spec.StoredResidual`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.conversion import Purpose
from pipeline.hf.base_files import base_config
from pipeline.hf.write import Export, PlannedTensor, dtype_name
from pipeline.model.decoder import Decoder
from pipeline.model.families import FusedPart, HfTensor, family_of, fuse, hf_tensor
from pipeline.model.from_hf import RESIDUAL_KEY, is_base
from pipeline.model.merged_model import merged_widths
from pipeline.model.open_weights import OWN_INPUT, OWN_OUTPUT
from pipeline.model.spec import DecoderSpec, MixtureSpec, StoredResidual, scale_in
from pipeline.scale.plan import Widths, added_widths

_HEADS_NORMS = ("attention.query_norm", "attention.key_norm")
# Row and column of each block in the fused matrix (SCALE, Eq. 1). `expansion` is the added block of
# embedding and output, which have new columns only.
_BLOCK_POSITIONS = {
    "expansion_to_base": (0, 1),
    "base_to_expansion": (1, 0),
    "expansion_to_expansion": (1, 1),
    "expansion": (0, 1),
}


def merged_export(
    model: TrainedModel, dtype: torch.dtype, purpose: Purpose = "serving", tp_size: int = 1
) -> Export:
    """The contents of a merged export's folder.

    It is for any model without an expansion, and for Preserve and Adapt trained with `norm: base`
    on a family that allows it.

    Args:
        model: the trained model.
        dtype: the type of the weights.
        purpose: decides the scale at which added channels are stored.
        tp_size: how many GPUs a wider model can be split over; zeros fill up heads and channels.
    """
    scale = scale_in(dtype, for_training=purpose == "training")
    added = added_widths(model.plan)
    if model.plan is None or added is None:
        return _unwidened_export(model, dtype, scale)
    spec = model.spec
    wider = merged_widths(added, spec, tp_size)
    mixture, mixture_entries = _wider_mixture(spec, added)
    residual = _residual_of_widened_base(spec.residual, scale)
    if residual is None:
        read_unnormed = spec.norm_placement == "after"
        residual = StoredResidual(spec.widths.hidden_size, scale, read_unnormed)
    fusion = _Fusion(model, dtype, residual, spec.widths.hidden_size / wider.hidden_size)
    config = base_config(model.base.path) | {
        "vocab_size": spec.vocab_size,
        **asdict(wider),
        "head_dim": spec.head_dim,
        # An ordinary RMSNorm divides by all D' channels, ours by D: eps shrinks as the mean does.
        "rms_norm_eps": spec.norm_eps * fusion.normed_share,
        # The embedding's new columns are stored times s, and the output's are not: no tie.
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
        RESIDUAL_KEY: asdict(residual),
        **mixture_entries,
    }
    # On the meta device: it is built for the names and shapes of its parameters.
    with torch.device("meta"):
        ordinary = Decoder(replace(spec, widths=wider, mixture=mixture, tie_word_embeddings=False))
    tensors: dict[str, PlannedTensor] = {}
    for name, parameter in ordinary.named_parameters():
        make = partial(fusion.fused, name, parameter.shape)
        tensors[name] = PlannedTensor(name, tuple(parameter.shape), make)
    return Export("merged", config, _as_base_stores_them(model, tensors), dtype)


@dataclass(frozen=True)
class _Fusion:
    """Fuses the blocks of a widened model into the parameters of an ordinary wider one.

    Attributes:
        model: the widened model.
        dtype: the type of the export.
        residual: how the added channels of the residual stream are stored.
        normed_share: D / D', the share of the wider stream's channels that count in the mean
            square.
    """

    model: TrainedModel
    dtype: torch.dtype
    residual: StoredResidual
    normed_share: float

    def fused(self, name: str, shape: torch.Size) -> Tensor:
        """The ordinary parameter `name` of shape `shape`: the base's values and the blocks beside
        them, each in its corner.
        """
        base = open_weight(self.model, name, self.dtype)
        parts = {(0, 0): base, **_blocks_beside(self.model, name, base)}
        # Zeros where there is no block: preservation layers have no W12.
        values = torch.zeros(shape, dtype=self.dtype)
        for (row, column), part in parts.items():
            if base.dim() == 1:
                # A bias or gain: the added values come after the base's.
                start = [0] if (row, column) == (0, 0) else [base.shape[0]]
            else:
                # The last two dimensions are widened. A tensor of all experts has one more before
                # them.
                rows, columns = base.shape[-2:]
                start = [0] * (base.dim() - 2) + [row * rows, column * columns]
            corner: list[slice] = []
            for first, size in zip(start, part.shape, strict=True):
                corner.append(slice(first, first + size))
            if self._is_scaled_by_root(name):
                # Where the added channels are nearly 0, the root mean square over all D' channels
                # is √(D / D') times the one over D.
                part = part.float() * math.sqrt(self.normed_share)
            values[tuple(corner)] = part
        return self.residual.store(name, values)

    def _is_scaled_by_root(self, name: str) -> bool:
        """Whether the parameter is stored times √(D / D')."""
        stem = name.partition(".base")[0]
        is_query_or_key = stem.endswith(("attention.query", "attention.key"))
        if is_query_or_key and self.model.spec.query_key_norm == "head":
            # The norm of each head undoes it, and shares its eps with the others.
            return self.dtype == torch.float32
        return stem.endswith("norm") and not stem.endswith(_HEADS_NORMS)


def _wider_mixture(spec: DecoderSpec, added: Widths) -> tuple[MixtureSpec | None, dict[str, int]]:
    """The mixture of the ordinary model, and its entry in config.json.

    Its shared expert holds the expansion's FFN.
    """
    mixture = spec.mixture
    entry = family_of(spec).shared_experts
    if mixture is None or entry is None:
        return mixture, {}
    width = mixture.shared_size + added.intermediate_size
    # Configurations count shared experts, not channels: the rest of the last one is zero.
    count = math.ceil(width / mixture.intermediate_size)
    return replace(mixture, shared_size=count * mixture.intermediate_size), {entry: count}


def _blocks_beside(model: TrainedModel, name: str, base: Tensor) -> dict[tuple[int, int], Tensor]:
    """The blocks beside a base parameter, by row and column in the fused matrix.

    Args:
        model: the trained model.
        name: the base parameter.
        base: its values.
    """
    stem, _, kind = name.partition(".base")
    if kind.startswith((".experts.", ".router.", ".shared.")):
        _, module, linear, *_ = kind.split(".")
        return _blocks_beside_experts(model, f"{stem}.{linear}", module, base)
    blocks: dict[tuple[int, int], Tensor] = {}
    for block, place in _BLOCK_POSITIONS.items():
        path = f"{stem}.{block}{kind}"
        if path in model.shapes:
            blocks[place] = model.read(path)
    return blocks


def _blocks_beside_experts(
    model: TrainedModel, path: str, module: str, base: Tensor
) -> dict[tuple[int, int], Tensor]:
    """The blocks beside a map of a mixture, as `_blocks_beside`.

    Args:
        model: the trained model.
        path: the expansion's map, such as `layers.0.ffn.down`.
        module: `router`, `experts` or `shared`.
        base: the values of the base parameter.
    """
    is_down = path.endswith(".down")
    if module == "router" or (module == "experts" and not is_down):
        return {}  # these read no added channel
    blocks: dict[tuple[int, int], Tensor] = {}
    for block, place in _BLOCK_POSITIONS.items():
        name = f"{path}.{block}.weight"
        if name in model.shapes:
            blocks[place] = model.read(name).float()
    if is_down:
        # W21 (Σ p_e W_e h_e) = Σ p_e (W21 W_e) h_e: each expert writes its own part.
        to_expansion = blocks[1, 0]
        blocks[1, 0] = to_expansion @ base.float()
        if (0, 1) in blocks:
            blocks[1, 1] = blocks[1, 1] + to_expansion @ blocks[0, 1]
    if module == "experts":
        return {(1, 0): blocks[1, 0]}
    return blocks


def _as_base_stores_them(
    model: TrainedModel, tensors: Mapping[str, PlannedTensor]
) -> list[PlannedTensor]:
    """The tensors as the base's folder names and fuses them.

    tensors: our base parameters, by name.
    """
    targets: dict[HfTensor, list[tuple[FusedPart | None, PlannedTensor]]] = {}
    for name, planned in tensors.items():
        target = hf_tensor(name, model.spec)
        targets.setdefault(replace(target, part=None), []).append((target.part, planned))

    # The matrices of the experts of a map are written one after the other: a cache of one map makes
    # their tensor once, and holds no more than that.
    @lru_cache(maxsize=1)
    def experts_tensor(planned: PlannedTensor) -> Tensor:
        return planned.make()

    def expert_tensor(planned: PlannedTensor, index: int) -> Tensor:
        return experts_tensor(planned)[index]

    stored: list[PlannedTensor] = []
    for target, parts in targets.items():
        part, planned = parts[0]
        if target.experts is not None:
            for index, expert in enumerate(target.names()):
                make = partial(expert_tensor, planned, index)
                stored.append(PlannedTensor(expert, planned.shape[1:], make))
        elif target.three_16_bit_rows:
            stored.append(_sum_of_three(target.name, planned))
        elif part is None:
            stored.append(replace(planned, name=target.name))
        else:
            stored.append(_fused_parts(target.name, parts))
    return stored


def _sum_of_three(name: str, planned: PlannedTensor) -> PlannedTensor:
    """A router's bias in fp32, from three numbers of 16 bits each."""

    def total() -> Tensor:
        return planned.make().sum(0)

    return PlannedTensor(name, planned.shape[1:], total, torch.float32)


def _fused_parts(
    name: str, parts: Sequence[tuple[FusedPart | None, PlannedTensor]]
) -> PlannedTensor:
    """The matrix into which the base's folder fuses several maps, such as query, key and value."""
    by_index: dict[int, PlannedTensor] = {}
    groups = 1
    for part, planned in parts:
        assert part is not None, "all parts of a fused matrix are parts"
        by_index[part.index] = planned
        groups = part.groups
    in_order = [by_index[index] for index in sorted(by_index)]
    rows = sum(planned.shape[0] for planned in in_order)

    def fused() -> Tensor:
        return fuse([planned.make() for planned in in_order], groups)

    return PlannedTensor(name, (rows, *in_order[0].shape[1:]), fused)


def _unwidened_export(model: TrainedModel, dtype: torch.dtype, scale: float) -> Export:
    """The contents of the folder of a model without an expansion."""
    unties = model.spec.tie_word_embeddings and model.own_row_of is not None
    config = base_config(model.base.path) | {
        "vocab_size": model.spec.vocab_size,
        "num_hidden_layers": model.spec.num_layers,
        "tie_word_embeddings": model.spec.tie_word_embeddings and not unties,
        "dtype": dtype_name(dtype),
    }
    if model.spec.layers != model.base.spec.layers:
        config |= family_of(model.spec).layer_entries(model.spec)
    residual = _residual_of_widened_base(model.spec.residual, scale)
    if residual is not None:
        config[RESIDUAL_KEY] = asdict(residual)

    def values(name: str) -> Tensor:
        weight = open_weight(model, name, dtype)
        if residual is None:
            return weight
        return residual.store(name, weight.clone())

    tensors: dict[str, PlannedTensor] = {}
    for name, shape in model.shapes.items():
        if is_base(name):
            tensors[name] = PlannedTensor(name, shape, partial(values, name))
    if unties:
        # A tied output is no parameter of its own, but own rows make it a matrix of its own.
        shape = model.shapes["embedding.base.weight"]
        tensors["output.base"] = PlannedTensor("output.base", shape, partial(values, "output.base"))
    return Export("merged", config, _as_base_stores_them(model, tensors), dtype)


def open_weight(model: TrainedModel, name: str, dtype: torch.dtype) -> Tensor:
    """The whole base parameter `name` as open tokens read it, for a model in `dtype`.

    That is W + s B A for a linear map with an adapter, and the sum of the base's and the open
    tokens' own values for gains and rows. Such sums are in fp32; other parameters are as published
    or trained.
    """
    weight = model.read(name)
    path = name.removesuffix("base.weight") + "adapter"
    if path in model.adapters:
        change = model.read(f"{path}.b") @ model.read(f"{path}.a")
        return weight.float() + model.adapters[path].scale * change
    stem, separator, leaf = name.rpartition(".base.")
    own_gain = f"{stem}.own.{leaf}"
    if separator and own_gain in model.shapes:
        return weight.float() + model.read(own_gain)
    own_row_of = model.own_row_of
    if own_row_of is not None and name == "embedding.base.weight":
        # The decoder adds own rows to x after it multiplied the embedding by a factor (Gemma). The
        # factor is rounded to the weights' type: see `Decoder.embedded`.
        factor = torch.tensor(model.spec.embedding_scale, dtype=dtype).item()
        return weight.float() + own_row_of.spread(model.read(OWN_INPUT)) / factor
    if own_row_of is not None and name == "output.base":
        return weight.float() + own_row_of.spread(model.read(OWN_OUTPUT))
    return weight


def _residual_of_widened_base(
    residual: StoredResidual | None, scale: float
) -> StoredResidual | None:
    """How an export stores the residual stream of a base that was widened before.

    A smaller scale than the base's own would change what its norms compute.

    Args:
        residual: how the base stores it; None: it was not widened.
        scale: the scale of the export's added channels.
    """
    if residual is None:
        return None
    return replace(residual, scale=max(residual.scale, scale))
