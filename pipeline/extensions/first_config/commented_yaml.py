"""A first configuration as YAML, with comments that say where its values come from."""

from __future__ import annotations

from typing import Any

import torch
import yaml

from pipeline.data.tokenizer.chats import chat_template
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.errors import DataError
from pipeline.extensions.first_config.method import inner_width, narrowest_map
from pipeline.extensions.first_config.schedule import MUON_RATE_FACTOR
from pipeline.extensions.first_config.texts import TextMeasure, tokens_to_read
from pipeline.extensions.first_config.time_limit import TimeLimit
from pipeline.extensions.first_config.wanted import FirstRun
from pipeline.model.bases import kind_of, unsupported_in
from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import GIB, Cluster

_MUON_STATE_BYTES = 12
"""Bytes of training state a parameter: weight, gradient, master weight and momentum."""


def as_yaml(
    values: dict[str, Any],
    comments: dict[str, str],
    learned: TextMeasure,
    time: str = "",
) -> str:
    """The settings as YAML, with comments above the sections.

    Args:
        values: the settings.
        comments: comments by section, to which those of this function are added.
        learned: the texts.
        time: a comment on the duration, for the section `schedule`.
    """
    comments = comments | {
        "name": (
            "Written by `scale-cpt config init`, to begin with and to edit.\n"
            "docs/configuration.md explains every setting; `scale-cpt config show` with this file "
            "prints all, with\nthe defaults of those that are not here."
        ),
        "schedule": _schedule_comment(values, learned) + time,
    }
    text = ""
    for key, value in values.items():
        is_section = isinstance(value, dict)
        if is_section or key in comments:
            text += "\n"
        for line in comments.get(key, "").splitlines():
            text += f"# {line}\n"
        text += yaml.safe_dump(
            {key: value},
            sort_keys=False,
            allow_unicode=True,
            # None writes a mapping with inner mappings in lines, and the lists in it in brackets.
            default_flow_style=None if is_section else False,
            width=110,
        )
    return text.lstrip("\n")


def gate_comment(spec: DecoderSpec) -> str:
    comment = (
        "Fitted after training: text on which it stays closed gets the base's own logits "
        "(docs/gate.md)."
    )
    if not spec.is_native:
        return comment
    return (
        f"{comment}\n"
        "For an ordinary model, which any server runs: scale-cpt config init --without-gate."
    )


def method_comment(values: dict[str, Any], spec: DecoderSpec) -> str:
    method = values["method"]
    if method["name"] == "lora":
        return _low_rank_comment(method, spec)
    comment = _widths_comment(method, spec)
    l_fp = method["l_fp"]
    if "gate" not in values:
        return (
            f"{comment}\n"
            f"l_fp: the lower {l_fp} of the {spec.num_layers} layers never read the new blocks."
        )
    opened = [name for name in ("open_rows", "open_gains", "low_rank") if name in method]
    if not opened:
        return (
            f"{comment}\n"
            f"l_fp: the gate reads before layer {l_fp} of {spec.num_layers}, from which on open "
            "tokens read the new blocks.\nThe export of such a run has the format scale."
        )
    twice = ""
    if spec.is_native:
        twice = " The layers below the gate run twice."
    return (
        f"{comment}\n"
        f"From layer {l_fp} (l_fp) on, tokens that the gate opens also have weights of their own "
        f"({', '.join(opened)}),\nin which most of the new language is learned (docs/gate.md)."
        f"{twice}\nThe export of such a run has the format scale."
    )


def _low_rank_comment(method: dict[str, Any], spec: DecoderSpec) -> str:
    rank = method["rank"]
    more = ""
    if 2 * rank <= narrowest_map(spec):
        more = " With twice the rank more is learned."
    trained = "a trained difference of each norm's gains (open_gains)"
    if "open_rows" in method:
        trained += (
            ",\nand one of the embedding and output rows of every token that the new text has "
            "min_count times or more (open_rows)"
        )
    return (
        f"LoRA on every linear map, of rank {rank} for a hidden size of "
        f"{spec.widths.hidden_size}.{more}\n"
        f"Beside it there is {trained}.\n"
        "Only tokens for which the gate is open use any of these; the others get the frozen base "
        "(docs/gate.md).\n"
        "Of a text that opens the gate, the layers below the gate are computed twice, with and "
        "without them.\n"
        "The export has the format scale, which transformers loads with the code in its folder "
        "(docs/serving.md).\n"
        "To widen the base instead: method {name: scale, ...} (docs/method.md)."
    )


def _widths_comment(method: dict[str, Any], spec: DecoderSpec) -> str:
    base = spec.widths
    added = method["expansion"]
    inner = inner_width(spec)
    heads_share = added["num_attention_heads"] / base.num_attention_heads
    grown = (
        f"hidden {base.hidden_size} by {added['hidden_size'] / base.hidden_size:.0%}, "
        f"FFN {inner} by {added['intermediate_size'] / inner:.0%}, "
        f"attention heads {base.num_attention_heads} by {heads_share:.0%}"
    )
    computed = kind_of(spec).first_config_comment(spec)
    if computed is not None:
        return f"{computed}: {grown}."
    return (
        f"The base's widths grow: {grown}. The paper's grow by an eighth each,\n"
        "a small base's by what servers can split."
    )


def layout_comment(spec: DecoderSpec, cluster: Cluster, dtype: torch.dtype) -> str:
    comment = (
        f"The first layout that fits on {cluster.gpus} {cluster.processes} of "
        f"{cluster.gpu_memory_gib:g} GiB; `scale-cpt estimate` compares others."
    )
    if cluster.on_cpu and dtype == torch.bfloat16:
        comment += "\nIn bf16, in which this processor is faster."
    reason = unsupported_in(spec, torch.bfloat16)
    if reason is not None:
        comment += f"\nIn fp32: this is a base {reason}."
    return comment


def compile_comment() -> str:
    return (
        "Compiled layers take 9 to 14 % less time a step on an H100, and some ten seconds at the "
        "start.\nWith a ZeRO-3 file, remove it."
    )


def time_comment(values: dict[str, Any], limit: TimeLimit | None, learned: TextMeasure) -> str:
    """What a limit of time has left of the run, after a line break; empty where it is all."""
    if limit is None:
        return ""
    schedule = values["schedule"]
    read = schedule["steps"] * schedule["global_batch_size"] * values["data"]["sequence_length"]
    useful = tokens_to_read(learned)
    if read >= 0.9 * useful:
        return ""
    given = "" if limit.given else ", the default on CPUs"
    return (
        f"\nLimited to {limit.hours:g} h{given} for the whole job; "
        f"as much as is useful would be {useful:,} tokens (--hours)."
    )


def may_be_a_difference(values: dict[str, Any], spec: DecoderSpec) -> bool:
    """Whether full fine-tuning with the same gate could be exported as a packed difference."""
    return (
        "gate" in values and "vocabulary" not in values and spec.is_native and spec.mixture is None
    )


def difference_comment(base_parameters: int) -> str:
    state = base_parameters * _MUON_STATE_BYTES / GIB
    return (
        "Full fine-tuning with the same gate changes every weight, if there is memory for its "
        f"training state,\n{state:,.3g} GiB over all ranks by Muon: method {{name: fft}}, "
        f"schedule.optimizer muon, the rate times {MUON_RATE_FACTOR}, then\n"
        "scale-cpt convert --format difference (docs/full_difference.md)."
    )


def data_comment(values: dict[str, Any], learned: TextMeasure, known: TextMeasure) -> str:
    purpose = "Training on it keeps the model near the base"
    if values["data"].get("self_generated_fraction") == 0:
        purpose = (
            "The gate learns from it where to stay closed; no training\nstep reads it "
            "(self_generated_fraction: 0)"
        )
    return (
        f"new: about {learned.tokens:,} tokens, {learned.tokens_per_byte:.2f} a byte "
        f"(old: {known.tokens_per_byte:.2f}). If new takes many more than old,\n"
        "`scale-cpt vocabulary` adds tokens for it (docs/vocabulary.md).\n"
        f"old: about {known.tokens:,} tokens. Only its held-out part is read, to measure what is "
        "forgotten; to train on\nthe rest, set data.replay_fraction.\n"
        f"self_generated: text that the base writes. {purpose} (docs/self_generated.md)."
    )


def chats_comment(wanted: FirstRun, tokenizer: Tokenizer) -> str:
    """The comment on chats, each line after a line break; empty without a chat model."""
    lines: list[str] = []
    if wanted.old_chats:
        lines.append("self_generated_chats: the base answers the chats itself.")
    if wanted.new_chats:
        lines.append(
            "new_chats: chats in the new language, read in the second stage alone; the gate also "
            "learns from them where to open.\n"
            "self_generated_new_chats: what the base answers there, read in the first stage alone: "
            "so answers still end."
        )
    if not lines and _has_chat_template(tokenizer):
        lines.append(
            "The base has a chat template: --old-chats keeps its chats, and --new-chats teaches it "
            "to answer in the new language (docs/chat.md)."
        )
    return "".join(f"\n{line}" for line in lines)


def _has_chat_template(tokenizer: Tokenizer) -> bool:
    try:
        chat_template(tokenizer.path)
    except DataError:
        return False
    return True


def _schedule_comment(values: dict[str, Any], learned: TextMeasure) -> str:
    schedule = values["schedule"]
    sequences = schedule["steps"] * schedule["global_batch_size"]
    tokens = sequences * values["data"]["sequence_length"]
    comment = (
        f"{tokens:,} tokens in all, {tokens / learned.tokens:.2g} passes over the new text. "
        "Batch sizes count sequences; global_batch_size has\n"
        "to be a multiple of micro_batch_size times the data-parallel ranks.\n"
        "The rate is the paper's for a hidden size of 2048, times the square root of 2048 / "
        "this one"
    )
    if schedule.get("optimizer") == "muon":
        comment += f",\ntimes {MUON_RATE_FACTOR} for Muon (docs/methods.md#the-optimizer)"
    return comment + ". Also try half and twice."
