"""Which blocks exist in each layer, by SCALE's variants (SCALE, section 3.2), and by LoRA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.config.method import Initialisers, Lora, ScaleMethod
from pipeline.errors import ConfigError
from pipeline.open_weights import OpenWeights, open_weights_of

Module = Literal["attention", "ffn"]
GATE_LAYER = 2
"""The layer before which a gate reads where trained weights begin in the first layer."""


@dataclass(frozen=True)
class Widths:
    """The widths of a decoder, or of an expansion."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int


@dataclass(frozen=True)
class ExpansionPlan:
    """What SCALE or LoRA adds to a base, and which of the added blocks exist in each layer.

    Attributes:
        expansion: the added widths; None for LoRA, which widens nothing and has `own` alone.
        num_layers: the layers of the base.
        l_fp: the lowest `l_fp` layers are preservation layers, where W12 is zero and has no
            parameter; the others are collaborative. Preserve has `l_fp == num_layers`.
        collaborative_modules: the modules of collaborative layers that have W12.
        routed: whether a router chooses a path for each token (Route).
        router_threshold: the cosine above which a token keeps the preserved path.
        norm: the statistics that normalise the expansion stream; see `WidenedNorm`.
        initialisers: how the added blocks start.
        own: what tokens have of their own where a gate opens them; not in the paper.
    """

    expansion: Widths | None
    num_layers: int
    l_fp: int
    collaborative_modules: frozenset[Module] = frozenset()
    routed: bool = False
    router_threshold: float = 0.5
    norm: Literal["separate", "base"] = "separate"
    initialisers: Initialisers = field(default_factory=Initialisers)
    own: OpenWeights | None = None

    @property
    def collaborative_from(self) -> int:
        """The first layer in which the base stream may depend on trained parameters."""
        if self.own is None:
            return self.l_fp
        return min(self.l_fp, self.own.first_layer)

    @property
    def last_exact_layer(self) -> int:
        """The last layer before which the model has the base's exact stream.

        Preserve has it everywhere, Adapt up to the first layer with W12, and Route everywhere on
        its preserved path; open weights end it where they begin. `num_layers` stands
        for the stream after the last layer. A gate that reads above makes the layers between run
        twice.
        """
        if self.routed:
            return self.num_layers
        return self.collaborative_from

    @property
    def default_gate_layer(self) -> int:
        """The layer before which a gate reads the base's stream, if no setting says another.

        That is the last exact one; not 0, where the stream is the embedding, by which text is
        hardly told apart.
        """
        if self.last_exact_layer == 0:
            return min(GATE_LAYER, self.num_layers)
        return self.last_exact_layer

    def gate_layer(self, wanted: int | None) -> int:
        """The layer before which a gate reads: `wanted`, the setting gate.layer, or the default.

        Raises ConfigError if the base has fewer layers.
        """
        return checked_gate_layer(wanted, self.default_gate_layer, self.num_layers)

    def own_in(self, layer: int) -> OpenWeights | None:
        """What open tokens have of their own in `layer`; `num_layers` stands for the last norm."""
        if self.own is None or layer < self.own.first_layer:
            return None
        return self.own

    def has_own_gains(self, layer: int) -> bool:
        """Whether norms of `layer` have differences of their gains; `num_layers`: the last norm."""
        own = self.own_in(layer)
        return own is not None and own.gains

    def has_expansion_to_base(self, layer: int, module: Module) -> bool:
        """Whether W12 exists, and trains, in `module` of `layer`."""
        return layer >= self.l_fp and module in self.collaborative_modules


def added_widths(plan: ExpansionPlan | None) -> Widths | None:
    """The widths that a plan adds to a base; None where it is not widened."""
    return None if plan is None else plan.expansion


def plan_expansion(
    method: ScaleMethod | Lora,
    base: Widths,
    num_layers: int,
    own_tokens: tuple[int, ...] | None = None,
) -> ExpansionPlan:
    """The plan of what is added to a base; `own_tokens` are the ids with open rows, if the method
    has any.

    Raises ConfigError if the heads do not keep the grouped-query ratio, or l_fp or open_first_layer
    leaves no layer.
    """
    if isinstance(method, Lora):
        return ExpansionPlan(
            expansion=None,
            num_layers=num_layers,
            l_fp=num_layers,
            own=open_weights_of(method, num_layers, own_tokens),
        )
    heads = method.expansion.num_attention_heads
    ratio = base.num_attention_heads // base.num_key_value_heads
    if heads % ratio:
        raise ConfigError(
            f"method.expansion.num_attention_heads: expected a multiple of {ratio}, the base's "
            f"query heads per key/value head, found {heads}"
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
        own=open_weights_of(method, num_layers, own_tokens),
    )


def check_tensor_parallel(plan: ExpansionPlan, tp_size: int) -> None:
    """Raises ConfigError if an added width cannot be split over `tp_size` ranks."""
    added = plan.expansion
    if added is None:
        return
    if added.intermediate_size % tp_size:
        raise ConfigError(
            "method.expansion.intermediate_size: expected a multiple of parallel.tp_size "
            f"{tp_size}, found {added.intermediate_size}"
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


def checked_gate_layer(wanted: int | None, default: int, num_layers: int) -> int:
    """The layer before which a gate reads: `wanted`, the setting gate.layer, or the default.

    Raises:
        ConfigError: the base has fewer layers.
    """
    if wanted is None:
        return min(default, num_layers)
    if wanted > num_layers:
        raise ConfigError(
            f"gate.layer: {wanted} is beyond {num_layers}, which stands for the stream after the "
            f"base's last layer; use 0 to {num_layers}"
        )
    return wanted
