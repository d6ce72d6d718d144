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
    """number of optimizer steps"""
    global_batch_size: PositiveInt
    """sequences per optimizer step, over all ranks"""
    micro_batch_size: PositiveInt
    """sequences that a rank processes at a time; global_batch_size must be a multiple of its
    product with the data-parallel size"""
    learning_rate: PositiveFloat
    """peak learning rate, reached after the warm-up"""
    optimizer: Annotated[str, AfterValidator(_offered)] = "adamw"
    """adamw, muon (the matrices within layers; AdamW for all others), or one of an extension; all
    with learning_rate (docs/methods.md)"""
    decay: DecayShape = "linear"
    """shape of the learning rate's decay after the warm-up"""
    warmup_fraction: Fraction = 0.06
    """share of the steps over which the learning rate rises to its peak"""
    decay_fraction: Fraction = 0.1
    """for decay wsd: share of the steps, at the end, over which the learning rate falls"""
    final_learning_rate_fraction: Fraction = 0.0
    """learning rate at the end of the run, as a share of the peak"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """weight decay of matrices; biases and the gains of norms do not decay"""
    learning_rate_factors: Annotated[
        dict[str, PositiveFloat], AfterValidator(with_todays_names)
    ] = {}
    """factors of learning_rate, by kind of block (`expansion_to_base: 0.5`) or pattern of parameter
    names; the last that matches counts (docs/methods.md)"""
    weight_decay_factors: Annotated[
        dict[str, Annotated[float, Field(ge=0)]], AfterValidator(with_todays_names)
    ] = {}
    """factors of weight_decay, by kind of block or by pattern of parameter names"""
    # 0.95 as in GPT-3 and Llama: with 0.999 the second moment of a spike lasts for a thousand
    # steps.
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the two moments"""
    gradient_clipping: PositiveFloat = 1.0
    """largest global norm of the gradients; larger ones are scaled down to it"""
