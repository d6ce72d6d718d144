"""A first configuration for a base and texts: a method, and sizes that fit both."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.config.run import RunConfig, parse_config
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.extensions.first_config.commented_yaml import (
    as_yaml,
    chats_comment,
    compile_comment,
    data_comment,
    difference_comment,
    gate_comment,
    layout_comment,
    may_be_a_difference,
    method_comment,
    time_comment,
)
from pipeline.extensions.first_config.draft import Draft
from pipeline.extensions.first_config.method import has_no_gate
from pipeline.extensions.first_config.texts import TextMeasure, measure, measure_chats
from pipeline.extensions.first_config.time_limit import (
    TimeLimit,
    affordable_tokens,
    time_limit,
    within_limit,
)
from pipeline.extensions.first_config.wanted import FirstRun
from pipeline.hub import model_folder
from pipeline.installation import locate_docs
from pipeline.log import get_logger
from pipeline.model.bases import open_base, unsupported_in
from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import Cluster, gpu_speed
from pipeline.sizing.cpu_speed import cpu_speed, multiplies_bf16
from pipeline.sizing.parameters import parameters_of

_logger = get_logger(__name__)


def propose(wanted: FirstRun, cluster: Cluster) -> tuple[RunConfig, str]:
    """A configuration of a run on `cluster`, and the commented YAML that describes it.

    The YAML names the base as it was given.

    Raises:
        BaseModelError: the base cannot be read.
        DataError: a text cannot be read.
        ConfigError: the base and the texts allow no such run, or not in so few hours.
        LayoutError: the base does not fit on the cluster.
    """
    folder = model_folder(wanted.base)
    spec = open_base(folder).spec
    tokenizer = load_tokenizer(wanted.vocabulary or folder)
    _logger.info("measuring the texts")
    learned = measure(wanted.new, tokenizer, wanted.text_key)
    known = measure(wanted.old, tokenizer, wanted.old_text_key or wanted.text_key)
    wanted = replace(wanted, gated=wanted.gated and not has_no_gate(spec))
    tuned: TextMeasure | None = None
    if wanted.new_chats:
        tuned = measure_chats(wanted.new_chats, tokenizer, wanted.messages_key)
    dtype = precision(spec, cluster)
    draft = Draft(wanted, folder, spec, tokenizer, learned, known, cluster, dtype, tuned)

    limit = time_limit(wanted.hours, cluster)
    if limit is not None:
        _logger.info("measuring the speed of training, for a job of %.3g h", limit.hours)
        draft = draft.reading(tokens_within(limit, draft))
    _logger.info("choosing a layout")
    fit = draft.fitted()
    if limit is not None:
        fit = within_limit(fit, limit, spec, cluster, (learned, known))
    config, values = fit

    comments = {
        "gate": gate_comment(spec),
        "data": data_comment(values, learned, known) + chats_comment(wanted, tokenizer),
        "stages": (
            "First the texts, then chats in the new language, with the loss on their answers alone "
            "(docs/chat.md)."
        ),
    }
    comments["method"] = method_comment(values, spec)
    if may_be_a_difference(values, spec):
        base_parameters = parameters_of(config, spec).base
        comments["method"] += "\n" + difference_comment(base_parameters)
    comments["deepspeed"] = layout_comment(spec, cluster, dtype)
    comments["compile"] = compile_comment()
    text = as_yaml(
        values | {"base": str(wanted.base)}, comments, learned, time_comment(values, limit, learned)
    )
    return config, locate_docs(text)


def precision(spec: DecoderSpec, cluster: Cluster) -> torch.dtype:
    """The dtype of the weights: bf16, unless the base or the processor does better in fp32."""
    if unsupported_in(spec, torch.bfloat16) is not None:
        return torch.float32
    if not cluster.on_cpu:
        return torch.bfloat16
    if not multiplies_bf16():
        return torch.float32
    speeds = {
        dtype: cpu_speed(spec, dtype, cluster).flops_per_second
        for dtype in (torch.float32, torch.bfloat16)
    }
    return max(speeds, key=speeds.__getitem__)


def tokens_within(limit: TimeLimit, draft: Draft) -> int:
    """At least as many tokens as the run may read within the limit."""
    values = draft.values(draft.length, draft.methods()[0])
    config = parse_config(values, source="the proposed configuration")
    parameters = parameters_of(config, draft.spec)
    if draft.cluster.on_cpu:
        speed = cpu_speed(draft.spec, draft.dtype, draft.cluster)
    else:
        speed = gpu_speed(draft.cluster, has_experts=parameters.active < parameters.base)
    size = parameters.active + parameters.expansion
    return affordable_tokens(limit, size, speed.flops_per_second, draft.cluster)
