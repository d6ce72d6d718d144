"""A first configuration for a base and texts: a method, and sizes that fit both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.config.run import RunConfig, parse_config
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.hosted.bases import open_base, unsupported_in
from pipeline.hub import model_folder
from pipeline.installation import locate_docs
from pipeline.log import get_logger
from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import Cluster, gpu_speed
from pipeline.sizing.cpu_speed import cpu_speed, multiplies_bf16
from pipeline.sizing.first_config.commented_yaml import (
    as_yaml,
    chats_comment,
    data_comment,
    difference_comment,
    gate_comment,
    layout_comment,
    may_be_a_difference,
    method_comment,
    time_comment,
)
from pipeline.sizing.first_config.corpora import corpora_section
from pipeline.sizing.first_config.fitting import deepspeed_file
from pipeline.sizing.first_config.method import (
    has_no_gate,
    method_under_gate,
    min_count_of,
    scale_method,
    smaller_methods,
)
from pipeline.sizing.first_config.schedule import schedule_section, stages_section, wanted_length
from pipeline.sizing.first_config.search import first_that_fits
from pipeline.sizing.first_config.texts import (
    TextMeasure,
    measure,
    measure_chats,
    tokens_to_read,
)
from pipeline.sizing.first_config.time_limit import (
    TimeLimit,
    affordable_tokens,
    rhythm,
    time_limit,
    within_limit,
)
from pipeline.sizing.first_config.wanted import FirstRun
from pipeline.sizing.parameters import parameters_of

_KL_FRACTION_OF_CHATS = 1 / 8
"""The share of the sequences that train by KL in a run with a gate and chats. With it, answers in
the new language end, and tuning on its chats begins from the base's abilities
(docs/results/chat.md)."""


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
    dtype = precision(spec, cluster)
    draft = _Draft(wanted, folder, spec, tokenizer, learned, known, cluster, dtype)

    limit = time_limit(wanted.hours, cluster)
    if limit is not None:
        _logger.info("measuring the speed of training, for %.3g hours", limit.hours)
        draft = draft.reading(_tokens_within(limit, draft))
    _logger.info("choosing a layout")
    fit = first_that_fits(
        draft.values, wanted_length(draft.read, spec), draft.methods(), spec, cluster, dtype
    )
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
    text = as_yaml(
        values | {"base": str(wanted.base)}, comments, learned, time_comment(values, limit, learned)
    )
    return config, locate_docs(text)


@dataclass(frozen=True)
class _Draft:
    """What is known of a run before its sizes are.

    Attributes:
        wanted: what the user asks for.
        folder: the base's.
        spec: its architecture.
        tokenizer: the run's.
        learned: the new text.
        known: the old text.
        cluster: the ranks.
        dtype: of the weights.
        tokens: how many the run reads; None: as many as are useful.
    """

    wanted: FirstRun
    folder: Path
    spec: DecoderSpec
    tokenizer: Tokenizer
    learned: TextMeasure
    known: TextMeasure
    cluster: Cluster
    dtype: torch.dtype
    tokens: int | None = None

    @property
    def read(self) -> int:
        """How many tokens the run reads."""
        useful = tokens_to_read(self.learned)
        return useful if self.tokens is None else min(useful, self.tokens)

    def reading(self, tokens: int) -> _Draft:
        """The draft of a run that reads at most so many tokens."""
        return replace(self, tokens=tokens)

    def methods(self) -> list[dict[str, Any]]:
        """The methods to try, from the one that learns the most to the smallest."""
        if not self.wanted.gated:
            method = scale_method(self.spec)
            if self.spec.is_native:
                # A merged export needs it, and such a run is to be exported so.
                method["norm"] = "base"
            return [method]
        # Own rows with an extended vocabulary were not measured.
        with_rows = self.wanted.vocabulary is None
        method = method_under_gate(
            self.spec, with_rows=with_rows, min_count=min_count_of(self.learned)
        )
        return list(smaller_methods(method))

    def values(self, length: int, method: dict[str, Any]) -> dict[str, Any]:
        """The settings of a run with sequences of `length` tokens."""
        wanted, spec = self.wanted, self.spec
        # What open tokens have of their own learned more by Muon (docs/results/frontier.md).
        # Neither a hosted base nor a run without a gate was measured with it.
        by_muon = wanted.gated and spec.is_native
        schedule = schedule_section(self.read, length, spec, self.cluster, by_muon=by_muon)
        corpora = corpora_section(
            wanted, self.learned, self.known, self.tokenizer, length, self.read
        )
        stages: list[dict[str, Any]] = []
        if wanted.new_chats:
            tuned = measure_chats(wanted.new_chats, self.tokenizer, wanted.messages_key)
            stages = stages_section(schedule, length, tuned)
            schedule["steps"] = sum(stage["steps"] for stage in stages)
        values: dict[str, Any] = {
            "name": wanted.name,
            "folder": f"runs/{wanted.name}",
            "base": str(self.folder),
            "method": method,
            "data": {
                "folder": f"runs/{wanted.name}/tokens",
                "sequence_length": length,
                "corpora": corpora,
            },
            "schedule": schedule,
            "stages": stages,
            **rhythm(schedule),
            "deepspeed": deepspeed_file(1, self.dtype),
        }
        if not stages:
            del values["stages"]
        if wanted.gated:
            values["gate"] = _gate(wanted)
            # Without chats only the gate reads the self-generated text.
            values["data"]["self_generated_fraction"] = 0.0
            if wanted.has_chats:
                values["data"]["self_generated_fraction"] = _KL_FRACTION_OF_CHATS
        if wanted.vocabulary is not None:
            values["vocabulary"] = {"folder": str(wanted.vocabulary)}
        return values


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


def _tokens_within(limit: TimeLimit, draft: _Draft) -> int:
    """About the tokens that the run may read."""
    values = draft.values(wanted_length(draft.read, draft.spec), draft.methods()[0])
    config = parse_config(values, source="the proposed configuration")
    parameters = parameters_of(config, draft.spec)
    if draft.cluster.on_cpu:
        speed = cpu_speed(draft.spec, draft.dtype, draft.cluster)
    else:
        speed = gpu_speed(draft.cluster, has_experts=parameters.active < parameters.base)
    size = parameters.active + parameters.expansion
    return affordable_tokens(limit, size, speed.flops_per_second, draft.cluster)


def _gate(wanted: FirstRun) -> dict[str, Any]:
    """The section `gate`."""
    if not wanted.new_chats:
        return {}
    # Not the base's answers to chats in the new language: on these the gate should open.
    negatives = ["self_generated"]
    if wanted.old_chats:
        negatives.append("self_generated_chats")
    return {"negatives": negatives}
