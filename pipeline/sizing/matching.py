"""Methods that train equally many parameters, so that a comparison of them is fair; and SCALE's widths in proportion.

Each method has one size to choose: LoRA's rank, LLaMA Pro's added blocks, the layers that Freeze trains, SCALE's
widths. The trained parameters grow with the size, so the best one is found by bisection; they are counted on the model
itself, built without data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import lcm
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline import log
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
MULTIPLE_OF = 8
"""Added widths are multiples of it."""
_logger = log.get_logger(__name__)


def matched(name: MethodName, config: RunConfig, spec: DecoderSpec) -> Method:
    """The settings of a method that train as many parameters as the run `config`, as closely as its sizes allow.

    Settings that do not depend on the size are the run's own.
    """
    target = trained_parameters(config.method, spec)
    sizes, of_size = candidates(name, config, spec)
    above = bisect_left(sizes, target, key=lambda size: trained_parameters(of_size(size), spec))
    trained = {size: trained_parameters(of_size(size), spec) for size in sizes[max(0, above - 1) : above + 1]}
    best = min(trained, key=lambda size: abs(trained[size] - target))
    _logger.info(
        "%s: %s trained parameters, %+.1f %% off: %s",
        name,
        f"{trained[best]:,}",
        100 * (trained[best] / target - 1),
        of_size(best).model_dump(mode="json", exclude_defaults=True, exclude_none=True),
    )
    return of_size(best)


def trained_parameters(method: Method, spec: DecoderSpec) -> int:
    """How many parameters train under `method`."""
    with torch.device("meta"):
        return count_trained(method_for(method, Path(), seed=0).build(spec, SINGLE, "none"))


def candidates(name: MethodName, config: RunConfig, spec: DecoderSpec) -> tuple[Sequence[int], Callable[[int], Method]]:
    """The sizes of a method, in ascending order of the parameters that train, and its settings of a size."""
    own, hidden_size = config.method, spec.widths.hidden_size
    match name:
        case "fft":
            return [0], lambda _: FullFineTuning(name="fft")
        case "freeze":
            return range(spec.num_layers, 0, -1), lambda size: Freeze(name="freeze", frozen_layers=size)
        case "lora":
            lora = own if isinstance(own, Lora) else Lora(name="lora", rank=1)
            scale = lora.scale if lora.alpha else None
            return range(1, hidden_size + 1), lambda rank: lora.model_copy(
                update={"rank": rank, "alpha": scale and scale * rank}
            )
        case "llama_pro":
            return fitting_added_layers(spec.num_layers), lambda size: LlamaPro(name="llama_pro", added_layers=size)
        case _:
            steps = range(MULTIPLE_OF, max(hidden_size, MULTIPLE_OF) + 1, MULTIPLE_OF)
            unpadded = isinstance(own, ScaleMethod) and own.norm == "base"
            return steps, lambda size: grown(name, size, config, spec, unpadded=unpadded)


def grown(variant: Variant, hidden_size: int, config: RunConfig, spec: DecoderSpec, *, unpadded: bool) -> ScaleMethod:
    """SCALE with all widths grown by the same share, as closely as heads and tensor parallelism allow.

    If `unpadded`, a stock export of them needs no zeros. Other settings are those of the run `config`.

    Raises:
        ConfigError: the run's ranks cannot split any number of added heads.
    """
    base, tp_size, own = spec.widths, config.parallel.tp_size, config.method
    share, step = hidden_size / base.hidden_size, lcm(MULTIPLE_OF, tp_size)
    intermediate_size = step * max(1, round(share * base.intermediate_size / step))
    ratio = base.num_attention_heads // base.num_key_value_heads
    heads = range(ratio, max(base.num_attention_heads, ratio * tp_size) + 1, ratio)
    kept: dict[str, Any] = {"name": "scale"}
    l_fp = min(spec.num_layers - 1, max(1, round(spec.num_layers * PAPER_L_FP_SHARE)))
    if isinstance(own, ScaleMethod):
        kept = own.model_dump(exclude={"variant", "expansion", "l_fp"})
        l_fp = l_fp if own.l_fp is None else own.l_fp
    for count in sorted(heads, key=lambda count: abs(count - share * base.num_attention_heads)):
        if not heads_fit(count, ratio, tp_size):
            continue
        added = asdict(Widths(hidden_size, intermediate_size, count, count // ratio))
        if unpadded:
            whole = asdict(stock_widths(Widths(**added), spec, UNPADDED))
            added = {name: whole[name] - width for name, width in asdict(base).items()}
        if heads_fit(added["num_attention_heads"], ratio, tp_size) and added["intermediate_size"] % tp_size == 0:
            widths = ExpansionWidths(**{name: added[name] for name in ExpansionWidths.model_fields})
            return ScaleMethod(**kept, variant=variant, expansion=widths, l_fp=None if variant == "preserve" else l_fp)
    raise ConfigError(f"parallel.tp_size: {tp_size} ranks cannot split any number of added heads; take a smaller one")
