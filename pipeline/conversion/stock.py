"""`--format stock`: the widened model as an ordinary wider one, which any server loads with no code of ours.

The four blocks of a linear map fuse into one matrix. What remains is the norm: with `norm: base` both streams are
divided by the root mean square of `x` alone, while an ordinary RMSNorm takes it over the whole residual stream. So the
new part of that stream is stored scaled by a power of two s (which is exact), small enough to vanish in the mean
square, and the gains take it back (METHOD, "Stock export"). With D the base's width and D' the whole:

    what writes x_up (embedding, output and down maps)   times s
    gains   base: times √(D / D')    expansion: times √(D / D') / s
    eps     times D / D'

Where the base was widened before, what was added then is stored in the same way. config.json says which channels they
are, and s, so that training can take it back (`model.residual`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeline.conversion.hf_folder import Export, PlannedTensor, base_config, dtype_name, residual_config
from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.model.base_folder import hf_tensor
from pipeline.model.spec import StoredResidual, scale_in
from pipeline.scale.plan import ExpansionPlan

_WRITES_RESIDUAL = ("attention.output", "ffn.down")


def why_not_stock(model: TrainedModel) -> str | None:
    """What keeps the model from being an ordinary wider one; None where nothing does."""
    plan = model.plan
    if plan is None:
        return None
    if model.spec.family != "llama":
        return (
            "a GPT-NeoX base: its LayerNorm takes one mean over the residual stream, and its head size follows from it"
        )
    if plan.routed:
        return "variant route: no ordinary model runs two paths"
    if plan.norm != "base":
        return "method.norm separate: an ordinary RMSNorm takes one mean square for both streams (norm: base allows it)"
    return None


def stock_export(model: TrainedModel, dtype: torch.dtype) -> Export:
    """Preserve and Adapt on a base of the Llama family, trained with `norm: base`.

    Raises:
        ConversionError: the model is another; says why.
    """
    reason = why_not_stock(model)
    if reason is not None or model.plan is None:
        raise ConversionError(f"{model.checkpoint}: --format stock cannot express {reason}; use --format scale")
    widths, added = model.spec.widths, model.plan.expansion
    residual = StoredResidual(model.spec.normed_size or widths.hidden_size, scale_in(dtype))
    fusion = Fusion(model, model.plan, residual, dtype)
    config = base_config(model.base.path) | {
        "hidden_size": fusion.hidden_size,
        "intermediate_size": widths.intermediate_size + added.intermediate_size,
        "num_attention_heads": widths.num_attention_heads + added.num_attention_heads,
        "num_key_value_heads": widths.num_key_value_heads + added.num_key_value_heads,
        "head_dim": model.spec.head_dim,
        "rms_norm_eps": model.spec.norm_eps * widths.hidden_size / fusion.hidden_size,
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
        **residual_config(residual),
    }
    return Export(format="stock", config=config, tensors=list(fusion.tensors()), dtype=dtype)


def stock_hidden_size(hidden_size: int, heads: int) -> int:
    """The next width that `heads` divides, which transformers asks for; the channels between stay zero."""
    return -(-hidden_size // heads) * heads


@dataclass(frozen=True)
class Fusion:
    """Each ordinary tensor from the blocks that it is made of."""

    model: TrainedModel
    plan: ExpansionPlan
    residual: StoredResidual
    dtype: torch.dtype

    @property
    def hidden_size(self) -> int:
        """D', the width of the ordinary model."""
        widths, added = self.model.spec.widths, self.plan.expansion
        heads = widths.num_attention_heads + added.num_attention_heads
        return stock_hidden_size(widths.hidden_size + added.hidden_size, heads)

    def tensors(self) -> Iterator[PlannedTensor]:
        """All tensors of the folder, in the order of the base's parameters."""
        for name, shape in self.model.shapes.items():
            if name.endswith(".base.weight") or name.endswith(".base.bias"):
                yield self._tensor(name, shape)
        # Untied even where the base ties it: the embedding's new columns are scaled, and differ from the output's.
        vocab_size = self.model.spec.vocab_size
        fused = (vocab_size, self.hidden_size)
        yield PlannedTensor(hf_tensor("output.base", self.model.spec).name, fused, partial(self._output, fused))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> PlannedTensor:
        stem, kind = name.rsplit(".base.", 1)
        target = hf_tensor(name, self.model.spec).name
        writes_residual = stem.endswith(_WRITES_RESIDUAL)
        make: Callable[[], Tensor]
        fused: tuple[int, ...]
        if stem.endswith("norm"):
            fused, make = (self.hidden_size,), partial(self._gain, stem)
        elif stem == "embedding":
            fused = (shape[0], self.hidden_size)
            make = partial(self._embedding, fused)
        elif kind == "bias":
            fused = (self.hidden_size if writes_residual else shape[0] + self._rows(f"{stem}.base_to_expansion.bias"),)
            make = partial(self._bias, stem, fused)
        elif writes_residual:
            fused = (self.hidden_size, shape[1] + self._columns(f"{stem}.expansion_to_expansion.weight"))
            make = partial(self._linear, stem, fused)
        else:
            fused = (shape[0] + self._rows(f"{stem}.base_to_expansion.weight"), self.hidden_size)
            make = partial(self._linear, stem, fused)
        return PlannedTensor(target, fused, lambda: self.residual.store(name, make()))

    def _rows(self, name: str) -> int:
        return self.model.shapes[name][0]

    def _columns(self, name: str) -> int:
        return self.model.shapes[name][1]

    def _linear(self, stem: str, shape: tuple[int, ...]) -> Tensor:
        """[[W, W12], [W21, W22]]; what no block fills is zero."""
        fused = torch.zeros(shape, dtype=self.dtype)
        rows, columns = self.model.shapes[f"{stem}.base.weight"]
        up_rows, up_columns = self.model.shapes[f"{stem}.expansion_to_expansion.weight"]
        above, below = slice(0, rows), slice(rows, rows + up_rows)
        left, right = slice(0, columns), slice(columns, columns + up_columns)
        fused[above, left] = self.model.read(f"{stem}.base.weight")
        if f"{stem}.expansion_to_base.weight" in self.model.shapes:
            fused[above, right] = self.model.read(f"{stem}.expansion_to_base.weight")
        fused[below, left] = self.model.read(f"{stem}.base_to_expansion.weight")
        fused[below, right] = self.model.read(f"{stem}.expansion_to_expansion.weight")
        return fused

    def _bias(self, stem: str, shape: tuple[int, ...]) -> Tensor:
        bias, added = (self.model.read(f"{stem}.{block}.bias") for block in ("base", "base_to_expansion"))
        return self._row(shape, bias, added)

    def _gain(self, stem: str) -> Tensor:
        correction = math.sqrt(self.model.spec.widths.hidden_size / self.hidden_size)
        gain = self.model.read(f"{stem}.base.weight").float() * correction
        added = self.model.read(f"{stem}.expansion.weight") * correction
        return self._row((self.hidden_size,), gain, added)

    def _row(self, shape: tuple[int, ...], base: Tensor, added: Tensor) -> Tensor:
        fused = torch.zeros(shape, dtype=self.dtype)
        fused[: len(base)] = base
        fused[len(base) : len(base) + len(added)] = added
        return fused

    def _embedding(self, shape: tuple[int, ...]) -> Tensor:
        return self._beside(shape, "embedding.base.weight", "embedding.expansion.weight")

    def _output(self, shape: tuple[int, ...]) -> Tensor:
        return self._beside(shape, "output.base", "output.expansion")

    def _beside(self, shape: tuple[int, ...], base: str, expansion: str) -> Tensor:
        """[base, expansion, 0]: the columns side by side."""
        fused = torch.zeros(shape, dtype=self.dtype)
        width, added = self.model.spec.widths.hidden_size, self.plan.expansion.hidden_size
        fused[:, :width] = self.model.read(base)
        fused[:, width : width + added] = self.model.read(expansion)
        return fused
