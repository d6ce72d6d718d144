"""The section `method` of a first configuration: the paper's proportions on another base."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from pipeline.config.method import OwnRows, ScaleMethod
from pipeline.errors import ConfigError
from pipeline.hosted.spec import HostedSpec
from pipeline.hosted.unsupported import check_hosted_method
from pipeline.model.merged_model import merged_widths
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import GATE_LAYER, Widths

_WIDER_BY = 1 / 8
"""The paper's expansion, as a share of every width."""
_L_FP_SHARE = 3 / 16
"""The paper's share of the layers without W12."""
_GATED_L_FP = 0
"""l_fp under a gate: open tokens have weights of their own from there on. The lower they begin, the
more they learn (studies/LOG.md); the layers below the gate then run twice, 2 of them by default
(docs/adr/0033-lora-under-a-gate.md)."""
_LOW_RANK = 8
"""Rank of open tokens' low-rank differences beside the expansion (studies/LOG.md)."""
_MULTIPLE_OF = 8
"""Added widths are multiples of it, as kernels prefer."""


def scale_method(spec: DecoderSpec) -> dict[str, Any]:
    """SCALE with all widths grown by a share, as closely as heads and a merged export allow."""
    base = spec.widths
    hidden_size = _multiple(_WIDER_BY * base.hidden_size)
    share = hidden_size / base.hidden_size
    intermediate_size = _multiple(share * inner_width(spec))
    kv_heads = max(1, math.ceil(share * base.num_key_value_heads - 0.5))
    heads = kv_heads * base.num_attention_heads // base.num_key_value_heads

    widths = Widths(hidden_size, intermediate_size, heads, kv_heads)
    added = asdict(widths)
    if spec.is_native:
        # The widths of the merged export, which pads some of them with zeros: train these, too.
        whole = asdict(merged_widths(widths, spec))
        for name, width in asdict(base).items():
            added[name] = whole[name] - width
    del added["num_key_value_heads"]  # it follows from the query heads

    l_fp = min(spec.num_layers - 1, max(1, round(spec.num_layers * _L_FP_SHARE)))
    return {"name": "scale", "variant": "adapt", "expansion": added, "l_fp": l_fp}


def with_own_weights(
    method: dict[str, Any], spec: DecoderSpec, *, with_rows: bool
) -> dict[str, Any]:
    """The method for a run with a gate: what closed tokens never read may change more.

    On a mixture of experts no low-rank differences are proposed: its experts have none, and what
    those of its other maps gain was not measured.
    """
    if isinstance(spec, HostedSpec):
        return _hosted_with_own_weights(method, spec, with_rows=with_rows)
    gated = {
        **method,
        "l_fp": _GATED_L_FP,
        "collaborative_modules": "both",
        "norm": "base",
    }
    if with_rows:
        gated["own_rows"] = {"min_count": OwnRows().min_count}
    gated["own_gains"] = True
    if spec.mixture is None:
        gated["low_rank"] = _LOW_RANK
    return gated


def _hosted_with_own_weights(
    method: dict[str, Any], spec: HostedSpec, *, with_rows: bool
) -> dict[str, Any]:
    """As `with_own_weights`, with those of the weights that a hosted base takes.

    Its layers run once, so that W12 begins where the gate reads.
    """
    l_fp = min(GATE_LAYER, spec.num_layers - 1)
    gated = {**method, "l_fp": l_fp, "collaborative_modules": "both"}
    own: dict[str, Any] = {"own_gains": True, "low_rank": _LOW_RANK}
    if with_rows:
        own = {"own_rows": {"min_count": OwnRows().min_count}, **own}
    for name, value in own.items():
        one_more = {**gated, name: value}
        try:
            check_hosted_method(ScaleMethod.model_validate(one_more), spec)
        except ConfigError:
            continue
        gated = one_more
    return gated


def has_no_gate(spec: DecoderSpec) -> bool:
    """Whether nothing can close a hosted base: it has several residual streams, or one layer."""
    if not isinstance(spec, HostedSpec):
        return False
    return not spec.structure.has_one_stream or spec.num_layers == 1


def inner_width(spec: DecoderSpec) -> int:
    """The inner width of the base's FFN; four times its hidden size where it tells none."""
    return spec.widths.intermediate_size or 4 * spec.widths.hidden_size


def _multiple(width: float) -> int:
    """The nearest multiple of _MULTIPLE_OF above 0."""
    return _MULTIPLE_OF * max(1, round(width / _MULTIPLE_OF))
