"""Matches the number of trained parameters across methods, so that a comparison of them is fair.

Each method has one size to choose: LoRA's rank, LLaMA Pro's added blocks, the layers that Freeze trains, SCALE's
widths. The trained parameters grow with the size, so the best one is found by bisection; they are counted on the model
itself, built without data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import lcm
from pathlib import Path
from typing import Literal

import torch

from pipeline.config.method import ExpansionWidths, Freeze, FullFineTuning, LlamaPro, Lora, Method, ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.methods import method_for
from pipeline.methods.baselines import fitting_added_layers
from pipeline.model.spec import DecoderSpec
from pipeline.model.stock_model import UNPADDED, stock_widths
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import Widths, heads_fit
from pipeline.sizing.memory import count_trained

MethodName = Literal["fft", "freeze", "lora", "llama_pro", "preserve", "adapt", "route"]
Variant = Literal["preserve", "adapt", "route"]
PAPER_L_FP_SHARE = 3 / 16
"""The share of preservation layers in the paper, for Llama-3.2-1B."""


@dataclass(frozen=True)
class Match:
    """The settings of a method that train closest to `target` parameters, and how many they train."""

    name: MethodName
    settings: Method
    trained: int
    target: int

    @property
    def off(self) -> float:
        """The relative deviation from the target."""
        return self.trained / self.target - 1


@dataclass(frozen=True)
class Family:
    """A method's settings by size; `sizes` are in ascending order of the parameters that train."""

    sizes: Sequence[int]
    of_size: Callable[[int], Method]

    def nearest(self, target: int, trained: Callable[[Method], int]) -> Method:
        """The settings that train closest to `target` parameters."""
        above = bisect_left(self.sizes, target, key=lambda size: trained(self.of_size(size)))
        candidates = [self.of_size(size) for size in self.sizes[max(0, above - 1) : above + 1]]
        return min(candidates, key=lambda settings: abs(trained(settings) - target))


class Matcher:
    """Finds settings for the base `spec`; settings that do not depend on the size are those of the run `config`.

    Added widths and FFN widths are multiples of `multiple_of`. If `unpadded`, and by default where the run's own method
    has `norm: base`, a stock export of them needs no zeros.
    """

    def __init__(
        self, config: RunConfig, spec: DecoderSpec, *, multiple_of: int = 8, unpadded: bool | None = None
    ) -> None:
        self.config = config
        self.spec = spec
        self.multiple_of = multiple_of
        is_stock = isinstance(config.method, ScaleMethod) and config.method.norm == "base"
        self.unpadded = is_stock if unpadded is None else unpadded

    def match(self, names: Iterable[MethodName], target: int | None = None) -> list[Match]:
        """The nearest settings of each method; `target` defaults to what the run's own method trains."""
        wanted = self.trained(self.config.method) if target is None else target
        matches = []
        for name in names:
            settings = self.family(name).nearest(wanted, self.trained)
            matches.append(Match(name, settings, self.trained(settings), wanted))
        return matches

    def trained(self, settings: Method) -> int:
        """How many parameters train under `settings`."""
        with torch.device("meta"):
            return count_trained(method_for(settings, Path(), self.config.seed).build(self.spec, SINGLE, "none"))

    def family(self, name: MethodName) -> Family:
        """The settings of a method that are searched for the nearest."""
        widths, layers = self.spec.widths, self.spec.num_layers
        match name:
            case "fft":
                return Family([0], lambda _: FullFineTuning(name="fft"))
            case "freeze":
                return Family(range(layers, 0, -1), lambda size: Freeze(name="freeze", frozen_layers=size))
            case "lora":
                return Family(range(1, widths.hidden_size + 1), self._lora)
            case "llama_pro":
                sizes = fitting_added_layers(layers)
                return Family(sizes, lambda size: LlamaPro(name="llama_pro", added_layers=size))
            case _:
                widest = max(widths.hidden_size, self.multiple_of)
                steps = range(self.multiple_of, widest + 1, self.multiple_of)
                return Family(steps, lambda size: self.grown(name, size))

    def _lora(self, rank: int) -> Lora:
        own = self.config.method
        if not isinstance(own, Lora):
            return Lora(name="lora", rank=rank)
        alpha = None if own.alpha is None else own.scale * rank
        return Lora(name="lora", rank=rank, alpha=alpha, target_modules=own.target_modules)

    def grown(self, variant: Variant, hidden_size: int) -> ScaleMethod:
        """SCALE with all widths grown by the same share, as closely as heads and tensor parallelism allow."""
        base, tp_size = self.spec.widths, self.config.parallel.tp_size
        share = hidden_size / base.hidden_size
        step = lcm(self.multiple_of, tp_size)
        intermediate_size = step * max(1, round(share * base.intermediate_size / step))
        own = self.config.method
        kept = own.model_dump(exclude={"variant", "expansion", "l_fp"}) if isinstance(own, ScaleMethod) else {}
        return ScaleMethod(
            **{"name": "scale", **kept},
            variant=variant,
            expansion=self._widths(hidden_size, intermediate_size, share * base.num_attention_heads),
            l_fp=None if variant == "preserve" else self._l_fp(),
        )

    def _widths(self, hidden_size: int, intermediate_size: int, wanted_heads: float) -> ExpansionWidths:
        """The added widths with the number of heads nearest to `wanted_heads` that the ranks can split."""
        base, tp_size = self.spec.widths, self.config.parallel.tp_size
        ratio = base.num_attention_heads // base.num_key_value_heads
        heads = range(ratio, max(base.num_attention_heads, ratio * tp_size) + 1, ratio)
        fitting = (count for count in heads if heads_fit(count, ratio, tp_size))
        for count in sorted(fitting, key=lambda count: abs(count - wanted_heads)):
            added = Widths(hidden_size, intermediate_size, count, count // ratio)
            if self.unpadded:
                whole = asdict(stock_widths(added, self.spec, UNPADDED))
                added = Widths(**{name: whole[name] - width for name, width in asdict(base).items()})
            if heads_fit(added.num_attention_heads, ratio, tp_size) and added.intermediate_size % tp_size == 0:
                sizes = asdict(added)
                return ExpansionWidths(**{name: sizes[name] for name in ExpansionWidths.model_fields})
        raise ConfigError(
            f"parallel.tp_size: {tp_size} ranks cannot split any number of added heads; take a smaller one"
        )

    def _l_fp(self) -> int:
        own = self.config.method
        if isinstance(own, ScaleMethod) and own.l_fp is not None:
            return own.l_fp
        return min(self.spec.num_layers - 1, max(1, round(self.spec.num_layers * PAPER_L_FP_SHARE)))
