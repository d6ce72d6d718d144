"""Which formats can express a model, and which of them is written.

The contents of each format are in a module of its own: `merged`, `difference`, `adapter` (peft),
and `scale_export` and `hosted_export` for the format `scale` on native and hosted bases.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import FullFineTuning, Method
from pipeline.conversion import Format, Purpose
from pipeline.conversion.adapter import adapter_export, adapter_unsupported_reason
from pipeline.conversion.difference import FOUR_BITS, Packing, difference_export
from pipeline.conversion.hosted_export import hosted_export
from pipeline.conversion.merged import merged_export
from pipeline.conversion.model_card import base_hub_name
from pipeline.conversion.scale_export import scale_export
from pipeline.errors import ConversionError
from pipeline.hf import Exported
from pipeline.hf.write import Export
from pipeline.model.merged_model import merged_unsupported_reason
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan, added_widths


def unsupported_reason(
    settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
) -> dict[Exported, str | None]:
    """By format, why it cannot express a trained model; None where it can."""
    unwidened: str | None = None
    if added_widths(plan) is None:
        unwidened = f"method {settings.name} widens nothing"
    merged = merged_unsupported_reason(plan, spec, gated=gated)
    if plan is None and gated:
        merged = "a gate decides for each token (--without-gate leaves it out)"
    return {
        "merged": merged,
        "scale": _scale_unsupported_reason(plan, unwidened, gated=gated),
        "difference": _difference_unsupported_reason(settings, spec, gated=gated),
        "expansion": unwidened,
        "peft": adapter_unsupported_reason(settings, spec, gated=gated),
    }


def _scale_unsupported_reason(
    plan: ExpansionPlan | None, unwidened: str | None, *, gated: bool
) -> str | None:
    """Why a model cannot be exported in the format `scale`; None if it can.

    unwidened: the reason if the method adds no widths.
    """
    if plan is None or plan.own is None:
        return unwidened
    if gated:
        # Weights of open tokens' own need no widths: LoRA under a gate has none.
        return None
    if unwidened is not None and plan.own.tokens is None:
        return f"{unwidened}, and has no gate"
    return (
        "method.own_rows, own_gains, low_rank: tokens read them where a gate opens, and this model "
        "has no gate (leave --without-gate out)"
    )


def _difference_unsupported_reason(
    settings: Method, spec: DecoderSpec, *, gated: bool
) -> str | None:
    """Why a model cannot be exported as its base and a packed difference; None if it can."""
    if not isinstance(settings, FullFineTuning):
        return f"method {settings.name} does not train every parameter of the base"
    if not gated:
        return "tokens read the difference where a gate opens, and this model has no gate"
    if not spec.is_native:
        return "a base that runs by transformers' own code"
    if spec.mixture is not None:
        return "a mixture of experts: transformers holds the experts in other tensors than its base"
    if spec.new_tokens:
        return "an extended vocabulary: the base has no rows for its new tokens"
    if spec.residual is not None:
        return "a base that was widened before"
    return None


def describe_formats(reasons: Mapping[Exported, str | None]) -> str:
    """The formats that can express a model, and the reasons against the others, in one line."""
    supported: list[str] = []
    refused: list[str] = []
    for format, reason in reasons.items():
        if reason is None:
            supported.append(format)
        else:
            refused.append(f"not {format}: {reason}")
    return "; ".join([", ".join(supported), *refused])


def auto_format(reasons: Mapping[Exported, str | None]) -> Exported:
    """The format that `auto` stands for: the first of merged, difference and scale that can express
    the model; scale if none can.

    reasons: from `unsupported_reason`.
    """
    preferred: tuple[Exported, ...] = ("merged", "difference")
    for format in preferred:
        if reasons[format] is None:
            return format
    return "scale"


def choose_export(
    model: TrainedModel,
    format: Format,
    dtype: torch.dtype,
    purpose: Purpose = "serving",
    tp_size: int = 1,
    packing: Packing = FOUR_BITS,
) -> Export:
    """The contents of the exported folder.

    Args:
        model: the trained model.
        format: see `check_format`.
        dtype: the type of the weights.
        purpose: of a merged export.
        tp_size: how many GPUs a merged export is padded for.
        packing: how the format `difference` stores the difference.

    Raises:
        ConversionError: `format` cannot express the model, or it is not to be padded.
    """
    written = check_format(model, format)
    check_tp_size(model, written, tp_size)
    if written == "merged":
        return merged_export(model, dtype, purpose, tp_size)
    if written == "peft":
        return adapter_export(model, dtype, base_hub_name(model))
    if written == "difference":
        return difference_export(model, dtype, packing)
    if not model.base.spec.is_native:
        return hosted_export(model, dtype)
    return scale_export(model, dtype)


def check_tp_size(model: TrainedModel, written: Exported, tp_size: int) -> None:
    """Checks that a model in the format `written` can be padded for `tp_size` GPUs.

    Raises:
        ConversionError: it is not a merged export of a widened model.
    """
    if tp_size > 1 and (written != "merged" or model.plan is None):
        raise ConversionError(
            f"{model.checkpoint}: --tensor-parallel-size {tp_size} pads a merged export of a "
            f"widened model, found format {written} of method {model.settings.name}; leave it out"
        )


def check_format(model: TrainedModel, format: Format) -> Exported:
    """The format that is written where `format` is asked for.

    Raises:
        ConversionError: it cannot express the model.
    """
    reasons = unsupported_reason(
        model.settings, model.plan, model.stored.spec, gated=model.gate is not None
    )
    if format == "auto":
        format = auto_format(reasons)
    reason = reasons[format]
    if reason is not None:
        # The reasons against formats that nobody asked for are the dry run's to tell.
        possible = [other for other, against in reasons.items() if against is None]
        instead = f"; --format {' or '.join(possible)} can" if possible else ""
        raise ConversionError(
            f"{model.checkpoint}: cannot be exported with --format {format}: {reason}{instead}"
        )
    return format
