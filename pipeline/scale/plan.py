"""Which blocks exist in each layer, by SCALE's variants (SCALE, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from pipeline.config.method import Initialisers, ScaleMethod
from pipeline.errors import ConfigError

Module = Literal["attention", "ffn"]


@dataclass(frozen=True)
class Widths:
    """The widths of a decoder, or of an expansion."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int


@dataclass(frozen=True)
class ExpansionPlan:
    """What SCALE adds to a base of `num_layers` layers.

    The lowest `l_fp` layers are preservation layers, where W12 is zero and has no parameter; the others are
    collaborative. Preserve has `l_fp == num_layers`.
    """

    expansion: Widths
    num_layers: int
    l_fp: int
    collaborative_modules: frozenset[Module] = frozenset()
    routed: bool = False
    router_threshold: float = 0.5
    norm: Literal["separate", "base"] = "separate"
    initialisers: Initialisers = field(default_factory=Initialisers)

    def has_expansion_to_base(self, layer: int, module: Module) -> bool:
        """Whether W12 exists, and trains, in `module` of `layer`."""
        return layer >= self.l_fp and module in self.collaborative_modules


def plan_expansion(method: ScaleMethod, base: Widths, num_layers: int) -> ExpansionPlan:
    """The plan for widening a base.

    Raises ConfigError if the heads do not keep the grouped-query ratio, or l_fp leaves no collaborative layer; names
    the nearest valid values.
    """
    heads = method.expansion.num_attention_heads
    ratio = base.num_attention_heads // base.num_key_value_heads
    if heads % ratio:
        raise ConfigError(
            f"method.expansion.num_attention_heads: {heads} does not keep the base's {ratio} query heads "
            f"per key/value head; nearest that do: {_nearest(heads, lambda size: size % ratio == 0)}"
        )
    l_fp = num_layers if method.l_fp is None else method.l_fp
    if method.variant != "preserve" and l_fp >= num_layers:
        raise ConfigError(
            f"method.l_fp: {l_fp} leaves none of the base's {num_layers} layers collaborative; "
            f"use 0 to {num_layers - 1}, or variant preserve"
        )
    modules: frozenset[Module] = frozenset()
    if method.variant != "preserve":
        both, chosen = frozenset[Module](("attention", "ffn")), method.collaborative_modules
        modules = both if chosen == "both" else frozenset({chosen})
    return ExpansionPlan(
        expansion=Widths(
            hidden_size=method.expansion.hidden_size,
            intermediate_size=method.expansion.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=heads // ratio,
        ),
        num_layers=num_layers,
        l_fp=l_fp,
        collaborative_modules=modules,
        routed=method.variant == "route",
        router_threshold=method.router_threshold,
        norm=method.norm,
        initialisers=method.initialisers,
    )


def check_tensor_parallel(plan: ExpansionPlan, tp_size: int) -> None:
    """Raises ConfigError if an added width cannot be split over `tp_size` ranks; names the nearest that can.

    `tp_size` must divide the new FFN width, and divide the new heads or be a multiple of them.
    """
    added = plan.expansion
    if added.intermediate_size % tp_size:
        nearest = _nearest(added.intermediate_size, lambda size: size % tp_size == 0)
        raise ConfigError(
            f"method.expansion.intermediate_size: {added.intermediate_size} does not divide by "
            f"parallel.tp_size {tp_size}; nearest that do: {nearest}"
        )
    ratio = added.num_attention_heads // added.num_key_value_heads
    if not heads_fit(added.num_attention_heads, ratio, tp_size):
        raise ConfigError(
            f"method.expansion.num_attention_heads: {added.num_attention_heads}, with {added.num_key_value_heads} "
            f"key/value heads, cannot be split evenly over parallel.tp_size {tp_size}; "
            f"nearest that can: {_nearest(added.num_attention_heads, lambda heads: heads_fit(heads, ratio, tp_size))}"
        )


def heads_fit(heads: int, ratio: int, tp_size: int) -> bool:
    """Whether `heads` query heads, `ratio` per key/value head, can be split evenly over `tp_size` ranks."""

    def divides(count: int) -> bool:
        return count % tp_size == 0 or tp_size % count == 0

    return heads % ratio == 0 and divides(heads) and divides(heads // ratio)


def _nearest(size: int, fits: Callable[[int], bool]) -> str:
    """The nearest sizes below and above that fit."""
    below = next((smaller for smaller in range(size - 1, 0, -1) if fits(smaller)), None)
    above = next(larger for larger in count(size + 1) if fits(larger))
    return str(above) if below is None else f"{below}, {above}"
