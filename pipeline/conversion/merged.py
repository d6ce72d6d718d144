"""`--format merged`: a model of the base's own class, which any server loads with no code of ours.

Without an expansion it has the base's tensors: full fine-tuning and Freeze change their values, LLaMA Pro adds layers,
LoRA's adapters are merged. With one, it is an ordinary wider model: the four blocks of a linear map fuse into one
matrix. That leaves the norm: with `norm: base` both streams are divided by the root mean square of `x` alone, while an
ordinary RMSNorm takes it over the whole residual stream. So the new part of that stream is stored scaled by a power of
two s (which is exact), small enough to vanish in the mean square, and the gains undo it. Other tools cannot train
weights as small as those for serving in fp32: for training s is larger. With D the base's width and D' the whole:

    what writes x_up (embedding, output and down maps)   times s
    gains   base: times √(D / D')    expansion: times √(D / D') / s
    eps     times D / D'

Norms after attention and FFN (EXAONE 4) leave the new part scaled by s: their gains are times √(D / D') only, and the
maps that read the stream, with no norm before them, are times 1 / s in the new columns. A norm of each query and key
head shares eps, so these maps are times √(D / D') in fp32; in 16 bits rounding them would cost more than that eps.

In a mixture with a shared expert (GLM-4-MoE) the expansion's FFN becomes more inner width of that expert, which every
token takes; the router and the other experts read no added channel. W21 reads the sum of all experts. As it is linear,
each writes its own part: below its down map W stands W21 W. The shared expert's width is a multiple of an expert's, so
zeros fill it up.

If the base was widened before, the channels added then are stored in the same way. config.json says which channels are
scaled, and s, so that training can undo it (`pipeline.model.spec.StoredResidual`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
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
from pipeline.model.spec import DecoderSpec, MixtureSpec, StoredResidual, scale_in
from pipeline.scale.plan import ExpansionPlan

_HEADS_NORMS = ("attention.query_norm", "attention.key_norm")
# Row and column of each block in the fused matrix (SCALE, Eq. 1); `expansion` is the embedding's and the output's.
_BLOCK_POSITIONS = {
    "expansion_to_base": (0, 1),
    "base_to_expansion": (1, 0),
    "expansion_to_expansion": (1, 1),
    "expansion": (0, 1),
}


def merged_export(model: TrainedModel, dtype: torch.dtype, purpose: Purpose = "serving") -> Export:
    """Any model without an expansion; Preserve and Adapt trained with `norm: base`, where the base's family allows."""
    scale = scale_in(dtype, for_training=purpose == "training")
    if model.plan is None:
        return _unwidened_export(model, dtype, scale)
    spec, wider = model.spec, merged_widths(model.plan.expansion, model.spec)
    mixture, entries = _wider_mixture(spec, model.plan)
    normed = spec.widths.hidden_size / wider.hidden_size
    new = StoredResidual(spec.widths.hidden_size, scale, spec.norm_placement == "after")
    residual = _kept(spec.residual, scale) or new
    config = base_config(model.base.path) | {
        "vocab_size": spec.vocab_size,
        **asdict(wider),
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps * normed,
        # The embedding's new columns are scaled and the output's are not: they cannot be tied.
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
        RESIDUAL_KEY: asdict(residual),
        **entries,
    }
    with torch.device("meta"):
        ordinary = Decoder(replace(spec, widths=wider, mixture=mixture, tie_word_embeddings=False))

    def fused(name: str, shape: torch.Size) -> Tensor:
        """Zeros of `shape`, in which the base parameter `name` and each block beside it have a corner."""
        stem = name.partition(".base")[0]
        values, base = torch.zeros(shape, dtype=dtype), model.read(name)
        takes_root = stem.endswith("norm") and not stem.endswith(_HEADS_NORMS)
        if spec.query_key_norm == "head" and stem.endswith(("attention.query", "attention.key")):
            takes_root = dtype == torch.float32
        for position, part in {(0, 0): base, **_blocks_beside(model, name, base)}.items():
            # In a bias or gain, what is added comes second; the experts' matrices are one tensor.
            offsets = (
                (int(position != (0, 0)),)
                if base.dim() == 1
                else (*[0] * (base.dim() - 2), *position)
            )
            corner = [size * offset for size, offset in zip(base.shape, offsets, strict=True)]
            place = tuple(
                slice(start, start + size) for start, size in zip(corner, part.shape, strict=True)
            )
            values[place] = part.float() * math.sqrt(normed) if takes_root else part
        return residual.store(name, values)

    tensors = [
        (name, PlannedTensor(name, tuple(parameter.shape), partial(fused, name, parameter.shape)))
        for name, parameter in ordinary.named_parameters()
    ]
    return Export("merged", config, _stored(model, tensors), dtype)


def _wider_mixture(
    spec: DecoderSpec, plan: ExpansionPlan
) -> tuple[MixtureSpec | None, dict[str, int]]:
    """The ordinary model's mixture, whose shared expert holds the expansion's FFN, and its entry in config.json."""
    mixture, entry = spec.mixture, family_of(spec).shared_experts
    if mixture is None or entry is None:
        return mixture, {}
    count = math.ceil(
        (mixture.shared_size + plan.expansion.intermediate_size) / mixture.intermediate_size
    )
    return replace(mixture, shared_size=count * mixture.intermediate_size), {entry: count}


def _blocks_beside(model: TrainedModel, name: str, base: Tensor) -> dict[tuple[int, int], Tensor]:
    """The blocks beside `base`, the values of the base parameter `name`, by their places in the fused matrix."""
    stem, _, kind = name.partition(".base")
    if not kind.startswith((".experts.", ".router.", ".shared.")):
        paths = {f"{stem}.{block}{kind}": position for block, position in _BLOCK_POSITIONS.items()}
        return {
            position: model.read(path) for path, position in paths.items() if path in model.shapes
        }
    _, module, linear, *_ = kind.split(".")
    if module == "router" or (module == "experts" and linear != "down"):
        return {}  # these read no added channel
    paths = {
        f"{stem}.{linear}.{block}.weight": position for block, position in _BLOCK_POSITIONS.items()
    }
    blocks = {
        position: model.read(path).float()
        for path, position in paths.items()
        if path in model.shapes
    }
    if linear == "down":
        to_expansion = blocks[1, 0]
        blocks[1, 0] = to_expansion @ base.float()
        if (0, 1) in blocks:
            blocks[1, 1] = blocks[1, 1] + to_expansion @ blocks[0, 1]
    return blocks if module == "shared" else {(1, 0): blocks[1, 0]}


def _stored(
    model: TrainedModel, tensors: Iterable[tuple[str, PlannedTensor]]
) -> list[PlannedTensor]:
    """The tensors as the base's folder names and fuses them; given are those of our base parameters, by name."""
    held: dict[HfTensor, list[tuple[FusedPart | None, PlannedTensor]]] = {}
    for name, planned in tensors:
        target = hf_tensor(name, model.spec)
        held.setdefault(replace(target, part=None), []).append((target.part, planned))

    @lru_cache(maxsize=1)  # the experts of a map follow each other
    def of_all_experts(target: HfTensor) -> Tensor:
        return held[target][0][1].make()

    def of_expert(target: HfTensor, index: int) -> Tensor:
        return of_all_experts(target)[index]

    def stored_as(target: HfTensor) -> list[PlannedTensor]:
        part, first = held[target][0]
        if target.experts is not None:
            return [
                PlannedTensor(expert, first.shape[1:], partial(of_expert, target, index))
                for index, expert in enumerate(target.names())
            ]
        if target.in_three:
            whole = PlannedTensor(
                target.name, first.shape[1:], lambda: first.make().sum(0), torch.float32
            )
            return [whole]
        if part is None:
            return [replace(first, name=target.name)]
        in_order = [
            planned
            for _, planned in sorted(held[target], key=lambda pair: pair[0].index if pair[0] else 0)
        ]
        shape = (sum(planned.shape[0] for planned in in_order), *first.shape[1:])
        return [
            PlannedTensor(
                target.name, shape, lambda: fuse([one.make() for one in in_order], part.groups)
            )
        ]

    return [planned for target in held for planned in stored_as(target)]


def _unwidened_export(model: TrainedModel, dtype: torch.dtype, scale: float) -> Export:
    """The base's own tensors, with the layers that were added; adapters are merged: W + s B A in fp32."""
    config = base_config(model.base.path) | {
        "vocab_size": model.spec.vocab_size,
        "num_hidden_layers": model.spec.num_layers,
        "tie_word_embeddings": model.spec.tie_word_embeddings,
        "dtype": dtype_name(dtype),
    }
    if model.spec.layers != model.base.spec.layers:
        config |= family_of(model.spec).layer_entries(model.spec)
    residual = _kept(model.spec.residual, scale)
    if residual is not None:
        config[RESIDUAL_KEY] = asdict(residual)

    def values(name: str) -> Tensor:
        weight, path = model.read(name), name.removesuffix("base.weight") + "adapter"
        if path in model.adapters:
            weight = weight.float() + model.adapters[path].scale * (
                model.read(f"{path}.b") @ model.read(f"{path}.a")
            )
        return weight if residual is None else residual.store(name, weight.clone())

    names = filter(is_base, model.shapes)
    tensors = [
        (name, PlannedTensor(name, model.shapes[name], partial(values, name))) for name in names
    ]
    return Export("merged", config, _stored(model, tensors), dtype)


def _kept(residual: StoredResidual | None, scale: float) -> StoredResidual | None:
    """How an export whose added channels have this `scale` stores the residual stream of a base that stores it so.

    A smaller scale than the base's own would change what its norms compute.
    """
    return None if residual is None else replace(residual, scale=max(residual.scale, scale))
