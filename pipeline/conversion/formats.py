"""Which formats can express a model, and which of them is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.method import Method
from pipeline.conversion import AUTO, offered_formats
from pipeline.conversion.export_format import ExportFormat
from pipeline.errors import ConversionError
from pipeline.extension import load_named
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan


@cache
def export_formats() -> Mapping[str, ExportFormat]:
    """The formats of the core and of the installed extensions, by name.

    Raises:
        ExtensionError: an extension offers something else under one of the names.
    """
    formats: dict[str, ExportFormat] = {}
    for name, offered in offered_formats().items():
        formats[name] = load_named(offered.export_format, ExportFormat, name)
    return formats


def unsupported_reasons(
    settings: Method, plan: ExpansionPlan | None, spec: DecoderSpec, *, gated: bool
) -> dict[str, str | None]:
    """By format, why it cannot express a trained model; None where it can."""
    reasons: dict[str, str | None] = {}
    for name, format in export_formats().items():
        reasons[name] = format.unsupported_reason(settings, plan, spec, gated=gated)
    return reasons


def describe_formats(reasons: Mapping[str, str | None]) -> str:
    """The formats that can express a model, and the reasons against the others, in one line."""
    supported: list[str] = []
    refused: list[str] = []
    for format, reason in reasons.items():
        if reason is None:
            supported.append(format)
        else:
            refused.append(f"not {format}: {reason}")
    return "; ".join([", ".join(supported), *refused])


def auto_format(reasons: Mapping[str, str | None]) -> str:
    """The format that `auto` stands for: the first that it chooses from which can express the
    model; scale if none can.

    reasons: from `unsupported_reasons`.
    """
    for name, format in export_formats().items():
        if format.chosen_by_auto and reasons[name] is None:
            return name
    return "scale"


def check_format(model: TrainedModel, format: str) -> ExportFormat:
    """The format that is written where `format` is asked for.

    Raises:
        ConversionError: it cannot express the model.
    """
    reasons = unsupported_reasons(
        model.settings, model.plan, model.stored.spec, gated=model.gate is not None
    )
    if format == AUTO:
        format = auto_format(reasons)
    reason = reasons[format]
    if reason is not None:
        # The reasons against formats that nobody asked for are the dry run's to tell.
        possible = [other for other, against in reasons.items() if against is None]
        instead = f"; --format {' or '.join(possible)} can" if possible else ""
        raise ConversionError(
            f"{model.checkpoint}: cannot be exported with --format {format}: {reason}{instead}"
        )
    return export_formats()[format]


def check_tp_size(model: TrainedModel, written: ExportFormat, tp_size: int) -> None:
    """Checks that a model in the format `written` can be padded for `tp_size` GPUs.

    Raises:
        ConversionError: it is not a merged export of a widened model.
    """
    if tp_size > 1 and (written.name != "merged" or model.plan is None):
        raise ConversionError(
            f"{model.checkpoint}: --tensor-parallel-size {tp_size} pads a merged export of a "
            f"widened model, found format {written.name} of method {model.settings.name}; leave "
            "it out"
        )
