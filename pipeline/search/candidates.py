"""What is tried: every shape of an expansion that the space holds and the parameters allow, at every learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pipeline.config.method import CollaborativeModules, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.estimation.matching import PAPER_L_FP_SHARE, Matcher, Variant
from pipeline.model.spec import DecoderSpec


@dataclass(frozen=True)
class Space:
    """The choices among which a search looks."""

    variants: tuple[Variant, ...] = ("preserve", "adapt", "route")
    width_shares: tuple[float, ...] = (1 / 16, 1 / 8, 1 / 4)
    """by how much the widths grow, as shares of the base's"""
    l_fp: tuple[int, ...] = ()
    """of adapt and route; none: the paper's share of the layers, half of them, and all but one"""
    collaborative_modules: tuple[CollaborativeModules, ...] = ("attention", "both")
    learning_rates: tuple[float, ...] = ()
    """none: the run's own, a third and three times of it"""
    max_parameters: int | None = None
    """the most that may train"""
    multiple_of: int = 8
    """of added hidden and FFN widths"""

    def completed(self, config: RunConfig, spec: DecoderSpec) -> Space:
        """The space with what was left to the run and its base."""
        own = config.schedule.learning_rate
        around = tuple(float(f"{rate:.3g}") for rate in (own / 3, own, 3 * own))
        return replace(
            self,
            l_fp=self.l_fp or usual_l_fp(spec.num_layers),
            learning_rates=self.learning_rates or around,
        )


@dataclass(frozen=True)
class Candidate:
    """A method's settings at a learning rate; `shape` names the settings, `trained` counts their parameters."""

    shape: str
    method: ScaleMethod
    trained: int
    learning_rate: float

    def __str__(self) -> str:
        return f"{self.shape} at {self.learning_rate:g}"


def usual_l_fp(num_layers: int) -> tuple[int, ...]:
    """The paper's share of the layers, half of them, and all but one: each leaves a layer to collaborate."""
    wanted = (round(num_layers * PAPER_L_FP_SHARE), num_layers // 2, num_layers - 1)
    return tuple(sorted({min(l_fp, num_layers - 1) for l_fp in wanted}))


def candidates(config: RunConfig, spec: DecoderSpec, space: Space) -> list[Candidate]:
    """All candidates of a completed `space`; what it does not say of a method is as in the run's own.

    Raises:
        ConfigError: an l_fp leaves no layer to collaborate, or nothing is as small as `max_parameters`.
    """
    if beyond := [l_fp for l_fp in space.l_fp if l_fp >= spec.num_layers]:
        raise ConfigError(f"--l-fp: expected 0 to {spec.num_layers - 1} of {spec.num_layers} layers, found {beyond[0]}")
    matcher = Matcher(config, spec, multiple_of=space.multiple_of)
    counted = {method: matcher.trained(method) for method in _methods(matcher, space)}
    fitting = {
        method: trained
        for method, trained in counted.items()
        if space.max_parameters is None or trained <= space.max_parameters
    }
    if not fitting:
        raise ConfigError(
            f"--max-parameters: expected {min(counted.values()):,} or more, which the smallest expansion trains, "
            f"found {space.max_parameters:,}; allow more, or smaller --width-shares or --multiple-of"
        )
    return [
        Candidate(shape_name(method), method, trained, rate)
        for (method, trained), rate in product(fitting.items(), space.learning_rates)
    ]


def shape_name(method: ScaleMethod) -> str:
    """What tells one candidate's settings from another's, as a name of a folder."""
    widths = f"{method.variant}-h{method.expansion.hidden_size}"
    return widths if method.l_fp is None else f"{widths}-lfp{method.l_fp}-{method.collaborative_modules}"


def hidden_sizes(width_shares: Sequence[float], base: int, multiple_of: int) -> list[int]:
    """Added hidden sizes nearest to these shares of the base's, each once, the smallest first."""
    return sorted({multiple_of * max(1, round(share * base / multiple_of)) for share in width_shares})


def _methods(matcher: Matcher, space: Space) -> Iterator[ScaleMethod]:
    sizes = hidden_sizes(space.width_shares, matcher.spec.widths.hidden_size, space.multiple_of)
    for variant, size in product(space.variants, sizes):
        method = matcher.family(variant).of_size(size)
        if not isinstance(method, ScaleMethod):
            raise AssertionError(f"{variant} is a variant of SCALE")
        if variant == "preserve":
            yield method
            continue
        for l_fp, modules in product(space.l_fp, space.collaborative_modules):
            yield method.model_copy(update={"l_fp": l_fp, "collaborative_modules": modules})
