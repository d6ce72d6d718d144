"""A first configuration for a base and texts: a method, and sizes that fit both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.hosted.bases import open_base
from pipeline.hub import model_folder
from pipeline.installation import locate_docs
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.first_config.commented_yaml import (
    as_yaml,
    chats_comment,
    data_comment,
    difference_comment,
    gate_comment,
    layout_comment,
    may_be_a_difference,
    method_comment,
)
from pipeline.sizing.first_config.corpora import corpora_section
from pipeline.sizing.first_config.fitting import deepspeed_file, fit_to_cluster, fit_under_gate
from pipeline.sizing.first_config.method import has_no_gate, scale_method
from pipeline.sizing.first_config.schedule import schedule_section, stages_section
from pipeline.sizing.first_config.texts import measure, measure_chats
from pipeline.sizing.first_config.wanted import FirstRun
from pipeline.sizing.parameters import parameters_of

_KL_FRACTION_OF_CHATS = 1 / 8
"""The share of the sequences that train by KL in a run with a gate and chats. With it, answers in
the new language end, and tuning on its chats begins from the base's abilities
(docs/results/chat.md)."""


def propose(wanted: FirstRun, cluster: Cluster) -> tuple[RunConfig, str]:
    """A configuration of a run on `cluster`, and the commented YAML that describes it.

    The YAML names the base as it was given.

    Raises:
        BaseModelError: the base cannot be read.
        DataError: a text cannot be read.
        ConfigError: the base and the texts allow no such run.
        LayoutError: the base does not fit on the cluster.
    """
    folder = model_folder(wanted.base)
    spec = open_base(folder).spec
    tokenizer = load_tokenizer(wanted.vocabulary or folder)
    learned = measure(wanted.new, tokenizer, wanted.text_key)
    known = measure(wanted.old, tokenizer, wanted.old_text_key or wanted.text_key)
    gated = wanted.gated and not has_no_gate(spec)
    wanted = replace(wanted, gated=gated)
    # What open tokens have of their own learned more by Muon (docs/results/frontier.md). Neither a
    # hosted base nor a run without a gate was measured with it.
    by_muon = gated and spec.is_native
    schedule, length = schedule_section(learned, spec, cluster, by_muon=by_muon)
    stages: list[dict[str, Any]] = []
    if wanted.new_chats:
        tuned = measure_chats(wanted.new_chats, tokenizer, wanted.messages_key)
        stages = stages_section(schedule, length, tuned)
        schedule["steps"] = sum(stage["steps"] for stage in stages)
    values: dict[str, Any] = {
        "name": wanted.name,
        "folder": f"runs/{wanted.name}",
        "base": str(folder),
        "method": scale_method(spec),
        "data": {
            "folder": f"runs/{wanted.name}/tokens",
            "sequence_length": length,
            "corpora": corpora_section(wanted, learned, known, tokenizer, length),
        },
        "schedule": schedule,
        "stages": stages,
        "validation": {"every_steps": max(1, schedule["steps"] // 20), "max_sequences": 64},
        "checkpoints": {"every_steps": max(1, schedule["steps"] // 10)},
        "deepspeed": deepspeed_file(1, spec, cluster),
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
    if wanted.gated:
        config, values = fit_under_gate(values, spec, cluster)
    else:
        if spec.is_native:
            # A merged export needs it, and such a run is to be exported so.
            values["method"] |= {"norm": "base"}
        config, values = fit_to_cluster(values, spec, cluster)
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
    comments["deepspeed"] = layout_comment(spec, cluster)
    text = as_yaml(values | {"base": str(wanted.base)}, comments, learned)
    return config, locate_docs(text)


def _gate(wanted: FirstRun) -> dict[str, Any]:
    """The section `gate`."""
    if not wanted.new_chats:
        return {}
    # Not the base's answers to chats in the new language: on these the gate should open.
    negatives = ["self_generated"]
    if wanted.old_chats:
        negatives.append("self_generated_chats")
    return {"negatives": negatives}
