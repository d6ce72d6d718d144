"""The ordinary model that a widened one may become: whether it can, with which widths, and who can
split it.

What its servers split evenly depends on its widths: the expansion's may be chosen so that they do.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from pipeline.model.families import family_of
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan, Widths

_GGUF_BLOCK = 256
"""The elements of a row that GGUF's K-quants need a multiple of."""
_MOST_RANKS = 8


def merged_unsupported_reason(
    plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
) -> str | None:
    """Why a model of that plan on a base of that architecture is not expressible as an ordinary
    one; None if it is."""
    if plan is None:
        return None
    if not spec.is_native:
        return f"{spec.noun} (model_type {spec.family}): its matrices are not widened"
    reason: str | None = None
    if plan.expansion is not None:
        reason = _unmerged_blocks_reason(plan, spec)
    if reason is None and plan.own is not None:
        reason = plan.own.unmerged_reason(
            spec.family,
            widened=plan.expansion is not None,
            norms_heads=spec.query_key_norm == "head",
        )
    # Last, so that leaving the gate out is advised only where that helps.
    if reason is None and gated:
        reason = "a gate decides for each token (--without-gate leaves it out)"
    return reason


def _unmerged_blocks_reason(plan: ExpansionPlan, spec: DecoderSpec) -> str | None:
    """Why the blocks of an expansion do not fuse with the base's matrices; None if they do."""
    reason = family_of(spec).merged_unsupported_reason
    if reason is not None:
        return f"a base of model_type {spec.family}: {reason}"
    if plan.routed:
        return "variant route: no ordinary model runs two paths"
    # The one mean square of the merged norm must be the base's: added channels are stored so small
    # that they do not count in it.
    if plan.norm != "base":
        return (
            "method.norm separate: an ordinary RMSNorm takes one mean square for both streams "
            "(norm: base allows it)"
        )
    return None


def merged_widths(added: Widths, spec: DecoderSpec, tp: int = 1, row_multiple: int = 1) -> Widths:
    """The widths of the ordinary model that a base becomes with `added` widths.

    `spec` is the base's architecture; `tp` and `row_multiple` are as in `padded_widths`.
    """
    base = spec.widths
    sums = Widths(
        hidden_size=base.hidden_size + added.hidden_size,
        intermediate_size=base.intermediate_size + added.intermediate_size,
        num_attention_heads=base.num_attention_heads + added.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads + added.num_key_value_heads,
    )
    return padded_widths(
        sums, spec.head_dim, tp, row_multiple, derives_head_dim=family_of(spec).derives_head_dim
    )


def describe_serving(added: Widths, spec: DecoderSpec) -> str:
    """How servers can split the ordinary model, and the next larger widths that need no padding."""
    whole = merged_widths(added, spec)
    ranks = [tp for tp in (1, 2, 4, _MOST_RANKS) if merged_widths(added, spec, tp) == whole]
    fits_gguf = merged_widths(added, spec, row_multiple=_GGUF_BLOCK) == whole
    rows = "whole" if fits_gguf else "in a larger format"
    text = f"split by tp {', '.join(map(str, ranks))}; GGUF's K-quants: {rows}"
    fitting = merged_widths(added, spec, _MOST_RANKS, _GGUF_BLOCK)
    if fitting == whole:
        return text
    more: list[str] = []
    for name, base_width in asdict(spec.widths).items():
        if name != "num_key_value_heads":  # it follows from the query heads
            more.append(f"{name} {getattr(fitting, name) - base_width}")
    return f"{text}; for both up to tp {_MOST_RANKS} add {', '.join(more)}"


def split_unsupported_reason(widths: Widths, tp: int) -> str | None:
    """Why vLLM and SGLang cannot split an ordinary model of these widths over `tp` ranks; None if
    they can.
    """
    reasons: list[str] = []
    if widths.num_attention_heads % tp:
        reasons.append(f"{widths.num_attention_heads} query heads")
    kv_heads = widths.num_key_value_heads
    if kv_heads % tp and tp % kv_heads:
        reasons.append(f"{kv_heads} key/value heads")
    if widths.intermediate_size % tp:
        reasons.append(f"{widths.intermediate_size} channels of the FFN")
    return ", ".join(reasons) or None


def describe_splitting(added: Widths | None, spec: DecoderSpec, tp: int) -> str:
    """Whether `tp` ranks can serve the merged export of a run, and what to do if they cannot.

    added: the expansion's widths; None: the run widens nothing.
    """
    if added is None:
        reason = split_unsupported_reason(spec.widths, tp)
        if reason is None:
            return f"a merged export splits by tp {tp}, as its base"
        return f"CANNOT BE SERVED AT TP {tp}, nor can the base: {reason} do not divide"

    whole = merged_widths(added, spec)
    reason = split_unsupported_reason(whole, tp)
    if reason is None:
        return f"a merged export: {describe_serving(added, spec)}"
    padded = merged_widths(added, spec, tp)
    more: list[str] = []
    for name, width in asdict(padded).items():
        width_of_base = getattr(spec.widths, name)
        if name != "num_key_value_heads" and width != getattr(whole, name):
            more.append(f"{name} {width - width_of_base}")
    return (
        f"CANNOT BE SERVED AT TP {tp} as it is: {reason} do not divide; choose now "
        f"{', '.join(more)} in method.expansion, or pad with zeros later "
        f"(scale-cpt convert --tensor-parallel-size {tp})"
    )


def padded_widths(
    widths: Widths, head_dim: int, tp: int, row_multiple: int, *, derives_head_dim: bool
) -> Widths:
    """The widths with the fewest parameters from `widths` on that servers can split.

    `tp` ranks split heads and channels evenly, and rows have a multiple of `row_multiple` elements.
    hidden_size is a multiple of the heads, as transformers requires, and heads · head_dim where
    servers derive the size of a head from it. Query heads stay the same multiple of key/value
    heads.
    """
    # An ordinary model has one ratio of query to key/value heads; the plan keeps the base's, so
    # that it divides.
    group = widths.num_attention_heads // widths.num_key_value_heads
    least = widths.num_key_value_heads
    if derives_head_dim:
        least = max(least, -(-widths.hidden_size // (group * head_dim)))

    def fitted(kv_heads: int) -> Widths:
        heads = group * kv_heads
        row = head_dim * heads if derives_head_dim else math.lcm(heads, row_multiple)
        return Widths(
            hidden_size=_up_to_multiple(widths.hidden_size, row),
            intermediate_size=_up_to_multiple(widths.intermediate_size, math.lcm(tp, row_multiple)),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
        )

    def fits(found: Widths) -> bool:
        heads = found.num_attention_heads
        kv_heads = found.num_key_value_heads
        splits_heads = heads % tp == 0
        splits_kv_heads = kv_heads % tp == 0 or tp % kv_heads == 0
        has_whole_rows = (
            found.hidden_size % row_multiple == 0 and head_dim * heads % row_multiple == 0
        )
        return splits_heads and splits_kv_heads and has_whole_rows

    def parameters(found: Widths) -> int:
        heads = 2 * head_dim * (found.num_attention_heads + found.num_key_value_heads)
        return found.hidden_size * (heads + 3 * found.intermediate_size)

    # Among so many successive numbers of heads is a multiple of all that is needed.
    candidates = map(fitted, range(least, least + tp * row_multiple))
    return min(filter(fits, candidates), key=parameters)


def _up_to_multiple(size: int, of: int) -> int:
    return -(-size // of) * of
