"""Which blocks exist in each layer, by SCALE's variants (SCALE, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """What SCALE adds to a base, and which of the added blocks exist in each layer.

    Attributes:
        expansion: the added widths.
        num_layers: the layers of the base.
        l_fp: the lowest `l_fp` layers are preservation layers, where W12 is zero and has no
            parameter; the others are collaborative. Preserve has `l_fp == num_layers`.
        collaborative_modules: the modules of collaborative layers that have W12.
        routed: whether a router chooses a path for each token (Route).
        router_threshold: the cosine above which a token keeps the preserved path.
        norm: the statistics that normalise the expansion stream; see `WidenedNorm`.
        initialisers: how the added blocks start.
    """

    expansion: Widths
    num_layers: int
    l_fp: int
    collaborative_modules: frozenset[Module] = frozenset()
    routed: bool = False
    router_threshold: float = 0.5
    norm: Literal["separate", "base"] = "separate"
    initialisers: Initialisers = field(default_factory=Initialisers)

    @property
    def last_exact_layer(self) -> int:
        """The last layer before which the model has the base's exact stream.

        Preserve has it everywhere, Adapt up to the first layer with W12, and Route everywhere on
        its preserved path. `num_layers` stands for the stream after the last layer.
        """
        if self.routed:
            return self.num_layers
        return self.l_fp

    def has_expansion_to_base(self, layer: int, module: Module) -> bool:
        """Whether W12 exists, and trains, in `module` of `layer`."""
        return layer >= self.l_fp and module in self.collaborative_modules


def plan_expansion(method: ScaleMethod, base: Widths, num_layers: int) -> ExpansionPlan:
    """The plan for widening a base.

    Raises ConfigError if the heads do not keep the grouped-query ratio, or l_fp leaves no
    collaborative layer.
    """
    heads = method.expansion.num_attention_heads
    ratio = base.num_attention_heads // base.num_key_value_heads
    if heads % ratio:
        raise ConfigError(
            f"method.expansion.num_attention_heads: expected a multiple of {ratio}, the base's "
            "query heads per "
            f"key/value head, found {heads}"
        )
    l_fp = num_layers if method.l_fp is None else method.l_fp
    if method.variant != "preserve" and l_fp >= num_layers:
        raise ConfigError(
            f"method.l_fp: {l_fp} leaves none of the base's {num_layers} layers collaborative; "
            f"use 0 to {num_layers - 1}, or variant preserve"
        )
    modules: frozenset[Module]
    if method.variant == "preserve":
        modules = frozenset()
    elif method.collaborative_modules == "both":
        modules = frozenset({"attention", "ffn"})
    else:
        modules = frozenset({method.collaborative_modules})
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
    """Raises ConfigError if an added width cannot be split over `tp_size` ranks."""
    added = plan.expansion
    if added.intermediate_size % tp_size:
        raise ConfigError(
            "method.expansion.intermediate_size: expected a multiple of parallel.tp_size "
            f"{tp_size}, found "
            f"{added.intermediate_size}"
        )
    heads = added.num_attention_heads
    kv_heads = added.num_key_value_heads
    # Ranks share heads evenly, or share a head: `tp_size / heads` ranks then hold the same one.
    for count in (heads, kv_heads):
        if count % tp_size and tp_size % count:
            raise ConfigError(
                f"method.expansion.num_attention_heads: {heads}, with {kv_heads} key/value heads: "
                "expected both numbers to be multiples or divisors of parallel.tp_size "
                f"{tp_size}"
            )
