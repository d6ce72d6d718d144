"""The section `method` of a first configuration: an expansion, or LoRA under a gate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeline.config.method import OpenRows, ScaleMethod
from pipeline.errors import ConfigError
from pipeline.extensions.first_config.texts import TextMeasure
from pipeline.model.bases import kind_of
from pipeline.model.merged_model import merged_widths
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import GATE_LAYER, Widths

_WIDER_BY = 1 / 8
"""Added width as a share of each of the base's widths, as in the paper."""
_L_FP_SHARE = 3 / 16
"""Share of the layers that have no W12, as in the paper."""
_GATED_L_FP = 0
"""l_fp under a gate, from which on open tokens have weights of their own. The lower it is, the more
they learn (studies/LOG.md); the layers below the gate then run twice, 2 of them by default
(docs/adr/0033-lora-under-a-gate.md)."""
_LOW_RANK = 8
"""Rank of open tokens' low-rank differences beside an expansion (studies/LOG.md)."""
_RANK_SHARE = 1 / 8
"""Rank of LoRA under a gate, as a share of the hidden size. The change of a map by one step then
does not depend on the width. Adapters have 15 to 19 % of the parameters of Llama 1B, 8B and 70B."""
_RANK_STEP = 4
"""By what the rank is divided where memory is short."""
_MIN_COUNTS = (OpenRows().min_count, 10, 5, 2, 1)
_FREQUENT_SHARE = 0.5
"""The least share of the new text's tokens that should have rows of their own."""
_MULTIPLE_OF = 8
"""Added widths are multiples of it: tensor cores and their kernels need aligned sizes."""


def scale_method(spec: DecoderSpec) -> dict[str, Any]:
    """The section `method`: SCALE that adds about the same share to every width.

    Numbers of heads are whole, and a merged export pads some widths: the shares differ by that.
    """
    base = spec.widths
    hidden_size = _multiple(_WIDER_BY * base.hidden_size)
    share = hidden_size / base.hidden_size
    intermediate_size = _multiple(share * inner_width(spec))
    # Rounded to the nearest number, halves down, and at least one.
    kv_heads = max(1, math.ceil(share * base.num_key_value_heads - 0.5))
    # Grouped-query attention: each added key/value head has as many query heads as the base's.
    heads = kv_heads * base.num_attention_heads // base.num_key_value_heads

    widths = Widths(hidden_size, intermediate_size, heads, kv_heads)
    added = asdict(widths)
    if spec.is_native:
        # A merged export pads some widths with zeros. They take the same memory: they train
        # instead.
        whole = asdict(merged_widths(widths, spec))
        for name, width in asdict(base).items():
            added[name] = whole[name] - width
    del added["num_key_value_heads"]  # it follows from the query heads

    l_fp = min(spec.num_layers - 1, max(1, round(spec.num_layers * _L_FP_SHARE)))
    return {"name": "scale", "variant": "adapt", "expansion": added, "l_fp": l_fp}


def smaller_methods(method: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The method, then what takes less memory: without rows, then with lower ranks too."""
    yield method
    if "open_rows" in method:
        method = {name: value for name, value in method.items() if name != "open_rows"}
        yield method
    while method["name"] == "lora" and method["rank"] >= _RANK_STEP * _LOW_RANK:
        method = {**method, "rank": method["rank"] // _RANK_STEP}
        yield method


def min_count_of(learned: TextMeasure) -> int:
    """How often a token must occur in the new text to get rows of its own.

    It is the default, or less in a small corpus, of whose tokens hardly any is so frequent.
    """
    for min_count in _MIN_COUNTS:
        if learned.share_of_frequent(min_count) >= _FREQUENT_SHARE:
            return min_count
    return _MIN_COUNTS[-1]


def method_under_gate(
    spec: DecoderSpec, *, with_rows: bool, min_count: int = OpenRows().min_count
) -> dict[str, Any]:
    """The section `method` for a run with a gate, with weights that only open tokens read.

    Low-rank differences of every map, with open rows and gains, learned as much as an expansion of
    the same size, and cost less (docs/results/frontier.md). A mixture's experts have none, so that
    there a dense expansion stands beside them.
    """
    opened = _rows_and_gains(min_count if with_rows else None)
    if not spec.is_native:
        return _with_supported_weights(scale_method(spec), spec, opened)
    if spec.mixture is None:
        # No rank may be above that of a map. Large bases have few key/value heads.
        rank = min(_multiple(_RANK_SHARE * spec.widths.hidden_size), narrowest_map(spec))
        return {"name": "lora", "rank": rank, **opened}
    return {
        **scale_method(spec),
        "l_fp": _GATED_L_FP,
        "collaborative_modules": "both",
        "norm": "base",
        **opened,
        "low_rank": min(_LOW_RANK, narrowest_map(spec)),
    }


def _with_supported_weights(
    method: dict[str, Any], spec: DecoderSpec, opened: dict[str, Any]
) -> dict[str, Any]:
    """The method with as many open weights as the base supports.

    Layers of transformers never run twice, so that W12 begins where the gate reads.
    """
    l_fp = min(GATE_LAYER, spec.num_layers - 1)
    gated = {**method, "l_fp": l_fp, "collaborative_modules": "both"}
    for name, value in {**opened, "low_rank": _LOW_RANK}.items():
        one_more = {**gated, name: value}
        try:
            kind_of(spec).check_method(ScaleMethod.model_validate(one_more), spec)
        except ConfigError:
            continue
        gated = one_more
    return gated


def _rows_and_gains(min_count: int | None) -> dict[str, Any]:
    """The settings of open gains, and before them, where `min_count` is given, of open rows."""
    settings: dict[str, Any] = {}
    if min_count is not None:
        settings["open_rows"] = {"min_count": min_count}
    settings["open_gains"] = True
    return settings


def has_no_gate(spec: DecoderSpec) -> bool:
    """Whether no gate is possible: a base of transformers with several residual streams, or one
    layer."""
    if spec.is_native:
        return False
    return not spec.has_one_stream or spec.num_layers == 1


def narrowest_map(spec: DecoderSpec) -> int:
    """The narrower side of a native base's narrowest linear map, experts and routers apart."""
    base = spec.widths
    key_value_width = base.num_key_value_heads * spec.head_dim
    return min(base.hidden_size, key_value_width, inner_width(spec))


def inner_width(spec: DecoderSpec) -> int:
    """The inner width of the base's FFN; by default four times its hidden size."""
    return spec.widths.intermediate_size or 4 * spec.widths.hidden_size


def _multiple(width: float) -> int:
    """The nearest multiple of _MULTIPLE_OF above 0."""
    return _MULTIPLE_OF * max(1, round(width / _MULTIPLE_OF))
