"""The section `schedule` of a run configuration: steps, batch and learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.config.reading import (
    Decay,
    Fraction,
    PositiveFloat,
    PositiveInt,
    Section,
    with_todays_names,
)
from pipeline.errors import ExtensionError, did_you_mean
from pipeline.extension import extensions

DecayShape = Literal["linear", "cosine", "wsd"]


CORE_OPTIMIZERS = {
    "adamw": "pipeline.optimizers.adamw:ADAMW",
    "muon": "pipeline.optimizers.muon:MUON",
}
"""Where each `pipeline.optimizers.optimizer.Optimizer` is, by its name."""


@cache
def offered_optimizers() -> Mapping[str, str]:
    """The optimizers of the core and of the installed extensions, as `CORE_OPTIMIZERS`.

    Raises:
        ExtensionError: an extension cannot be used, or has an optimizer of a name that is there.
    """
    offered = dict(CORE_OPTIMIZERS)
    for extension in extensions():
        for name, place in extension.optimizers().items():
            if name in offered:
                raise ExtensionError(
                    f"extension {extension.name}: its optimizer {name} is there already, as "
                    f"{offered[name]}; give it another name"
                )
            offered[name] = place
    return offered


def _offered(name: str) -> str:
    """The name of an optimizer, if there is one of that name."""
    names = list(offered_optimizers())
    if name not in names:
        raise ValueError(f"expected one of {', '.join(names)}{did_you_mean(name, names)}")
    return name


class Schedule(Section):
    """Steps, batch and learning rate. Batch sizes are numbers of sequences."""

    steps: PositiveInt
    """optimizer steps"""
    global_batch_size: PositiveInt
    """sequences per optimizer step, over all ranks"""
    micro_batch_size: PositiveInt
    """sequences at a time on a rank; global_batch_size is a multiple of its product with the
    data-parallel size"""
    learning_rate: PositiveFloat
    """peak, reached after the warm-up"""
    optimizer: Annotated[str, AfterValidator(_offered)] = "adamw"
    """adamw, muon (for the matrices within layers), or one of an extension (docs/methods.md)"""
    decay: DecayShape = "linear"
    """shape of the decay after the warm-up"""
    warmup_fraction: Fraction = 0.06
    """share of the steps over which the rate rises"""
    decay_fraction: Fraction = 0.1
    """for wsd: share of the steps, at the end, over which the rate falls"""
    final_learning_rate_fraction: Fraction = 0.0
    """rate at the end, as a share of the peak"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """of matrices; biases and gains do not decay"""
    learning_rate_factors: Annotated[
        dict[str, PositiveFloat], AfterValidator(with_todays_names)
    ] = {}
    """factors by kind of block (`expansion_to_base: 0.5`) or pattern of parameter names; the last
    that matches counts (docs/methods.md)"""
    weight_decay_factors: Annotated[
        dict[str, Annotated[float, Field(ge=0)]], AfterValidator(with_todays_names)
    ] = {}
    """factors by kind of block (`expansion_to_base: 0.5`) or pattern of parameter names; the last
    that matches counts (docs/methods.md)"""
    # 0.95 as in GPT-3 and Llama: with 0.999 the second moment of a spike lasts for a thousand
    # steps.
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of its two moments"""
    gradient_clipping: PositiveFloat = 1.0
    """largest global norm of the gradients"""
