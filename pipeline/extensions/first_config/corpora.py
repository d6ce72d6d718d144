"""The section `data.corpora` of a first configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.config.gate import GateSettings
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.extensions.first_config.texts import TextMeasure
from pipeline.extensions.first_config.wanted import FirstRun

_CHATS_HELDOUT = 0.01
_GATE_TEXT = 4
"""Self-generated text for a gate, as a multiple of gate.tokens: one to fit it, one to set its
threshold, and as much again in reserve."""


def corpora_section(
    wanted: FirstRun,
    learned: TextMeasure,
    known: TextMeasure,
    tokenizer: Tokenizer,
    length: int,
    read: int,
) -> dict[str, Any]:
    """The section `data.corpora` of a run that reads `read` tokens in sequences of `length`."""
    new = _corpus(learned, length)
    if wanted.text_key != "text":
        new["text_key"] = wanted.text_key
    old = {**_corpus(known, length), "role": "replay"}

    most = 50_000_000
    if wanted.gated and not wanted.has_chats:
        most = _GATE_TEXT * GateSettings().tokens
    sample: dict[str, Any] = {
        "tokens": max(20_000, min(most, read // 300)),
        "max_tokens": min(length, 2048),
    }
    if not tokenizer.document_start:
        # The tokenizer has no token to begin a text with: the base continues old texts.
        sample["prompts"] = list(known.inputs)  # a copy, or YAML writes an anchor
        sample["prompt_tokens"] = min(16, length // 4)
    self_generated: dict[str, Any] = {"role": "self_generated", "sample": sample}

    old_key = wanted.old_text_key or wanted.text_key
    if old_key != "text":
        old["text_key"] = old_key
        self_generated["text_key"] = old_key  # of its prompts, which are old texts
    corpora = {"new": new, "old": old, "self_generated": self_generated}
    return corpora | _corpora_of_chats(wanted, sample)


def _corpora_of_chats(wanted: FirstRun, sample: dict[str, Any]) -> dict[str, Any]:
    """The corpora of chats.

    sample: the section `sample` of the self-generated text, whose lengths are taken over.
    """
    corpora: dict[str, Any] = {}
    if wanted.old_chats:
        corpora["self_generated_chats"] = _answered(wanted, sample, wanted.old_chats)
    if wanted.new_chats:
        # As much weight as all other self-generated text together.
        weight = 1 + len(corpora)
        answered = _answered(wanted, sample, wanted.new_chats)
        corpora["self_generated_new_chats"] = {**answered, "weight": weight}
        corpora["new_chats"] = {
            "input": list(wanted.new_chats),
            "heldout_fraction": _CHATS_HELDOUT,
            "messages_key": wanted.messages_key,
        }
    return corpora


def _answered(wanted: FirstRun, sample: dict[str, Any], chats: Sequence[str]) -> dict[str, Any]:
    """A corpus of chats that the base answers itself."""
    return {
        "role": "self_generated",
        "messages_key": wanted.messages_key,
        "sample": {
            "tokens": sample["tokens"],
            "max_tokens": sample["max_tokens"],
            "prompts": list(chats),
        },
    }


def _corpus(text: TextMeasure, length: int) -> dict[str, Any]:
    """The entries of a corpus of texts.

    About 128 sequences are held out, and at least 0.1 % and at most 10 % of the documents.
    """
    heldout = float(f"{min(0.1, max(0.001, 128 * length / text.tokens)):.1g}")
    return {"input": text.inputs, "heldout_fraction": heldout}
