"""Whether the export of a run can be served by vLLM, for the dry run.

The widths of an expansion decide it, and they are chosen before training.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.gate import GateSettings
from pipeline.conversion.formats import auto_format
from pipeline.model.merged_model import describe_splitting
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import ExpansionPlan

_SERVED_TP = 2
"""The tensor-parallel size at which a run's export should be servable."""


def describe_serving(
    gate: GateSettings | None,
    expansion: ExpansionPlan | None,
    spec: DecoderSpec,
    refused: Mapping[str, str | None],
) -> str:
    """What runs the export of a run: for a merged one, whether _SERVED_TP GPUs can serve it.

    refused: by format, why it cannot express the model; None where it can.
    """
    format = auto_format(refused)
    if format == "merged":
        added = None if expansion is None else expansion.expansion
        return describe_splitting(added, spec, _SERVED_TP)
    not_merged = f"a merged export, for any server, is not possible: {refused['merged']}"
    if refused[format] is not None:
        return f"CANNOT BE SERVED: format {format} is not possible: {refused[format]}; {not_merged}"
    if format == "difference":
        return f"transformers runs format difference, vLLM does not; {not_merged}"
    not_run = _not_run_by_vllm(gate, expansion, spec)
    if not_run is None:
        return f"transformers and, on one rank, vLLM run format scale; {not_merged}"
    return f"transformers runs format scale, vLLM does not: it has {not_run}; {not_merged}"


def _not_run_by_vllm(
    gate: GateSettings | None, expansion: ExpansionPlan | None, spec: DecoderSpec
) -> str | None:
    """The part of a scale export that the plugin for vLLM does not run; None if it runs all.

    The plugin makes the same checks when it loads an export: serving/scale_cpt_serving.
    """
    if not spec.is_native:
        return spec.noun
    if spec.mixture is not None:
        return "a mixture of experts"
    if gate is not None and expansion is not None:
        runs_twice = expansion.gate_layer(gate.layer) > expansion.last_exact_layer
        if runs_twice and expansion.expansion is not None:
            return "layers that run twice below the gate, with added heads"
        if gate.features == "token+running_mean":
            return "a running mean that its gate reads (gate.features: token needs none)"
    for layer in spec.layers:
        if layer.rotary is not None and layer.rotary.context is not None:
            return "rotary frequencies that change with a text's length"
    return None
