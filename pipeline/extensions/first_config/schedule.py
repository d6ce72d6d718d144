"""The sections `schedule` and `stages` of a first configuration."""

from __future__ import annotations

import math
from typing import Any

from pipeline.extensions.first_config.texts import TextMeasure
from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import Cluster

_PAPER_HIDDEN_SIZE = 2048
_PAPER_RATE = 1e-3
MUON_RATE_FACTOR = 2
"""By Muon the best rates were 2 to 5 times the rule's, on two bases (docs/results/frontier.md)."""
_LONGEST = 8192
_SHORTEST = 64
"""Bounds of a sequence's length in tokens."""
_SHORT_CONTEXT = 1024
_SHORTEST_OF_LONG_CONTEXT = 256
"""The shortest sequences of a base whose context is above _SHORT_CONTEXT."""
_SEQUENCES = 4096
"""The fewest sequences that a run should read: a run of little text has shorter sequences."""
_STEPS = 1000
_LARGEST_STEP = 2**22
"""Tokens of a step in the paper's run. Smaller runs have smaller steps, about _STEPS of them."""
_SMALLEST_BATCH = 8
# Measured in docs/results/chat.md.
_PASSES_OF_CHATS = 2
"""How often chats in the new language are read, in the stage after the texts."""
_SHARE_OF_CHATS = 3 / 4
"""Their share of the sequences in that stage."""
_RATE_OF_CHATS = 1 / 3
"""The learning rate of that stage, as a share of the texts' rate."""


def stages_section(
    schedule: dict[str, Any], length: int, tuned: TextMeasure
) -> list[dict[str, Any]]:
    """The section `stages` of a run that learns texts, and then chats in the new language.

    The second stage also reads some of the texts, so that the model does not forget them.

    Args:
        schedule: the section `schedule`, of the texts alone.
        length: tokens of a sequence.
        tuned: the chats.
    """
    read = _PASSES_OF_CHATS * tuned.tokens / _SHARE_OF_CHATS
    steps = max(1, round(read / (schedule["global_batch_size"] * length)))
    rate = float(f"{schedule['learning_rate'] * _RATE_OF_CHATS:.1e}")
    weights = {
        "new": 1,
        # Its share of the sum of both weights is _SHARE_OF_CHATS.
        "new_chats": round(_SHARE_OF_CHATS / (1 - _SHARE_OF_CHATS)),
        # The base's own answers to the same users would pull against the better answers.
        "self_generated_new_chats": 0,
    }
    return [
        {"name": "texts", "steps": schedule["steps"], "weights": {"new_chats": 0}},
        {"name": "chats", "steps": steps, "learning_rate": rate, "weights": weights},
    ]


def wanted_length(read: int, spec: DecoderSpec) -> int:
    """The tokens of a sequence, for a run that reads `read` tokens."""
    context = 2 ** int(math.log2(spec.longest_document))
    length = min(_LONGEST, context)
    while read < _SEQUENCES * length and length > _SHORTEST_OF_LONG_CONTEXT:
        length //= 2
    # Not with a context of thousands of tokens: such a base would learn to read beginnings alone.
    while read < _SEQUENCES * length and length > _SHORTEST and context <= _SHORT_CONTEXT:
        length //= 2
    return length


def schedule_section(
    read: int, length: int, spec: DecoderSpec, cluster: Cluster, *, by_muon: bool
) -> dict[str, Any]:
    """The section `schedule` of a run that reads `read` tokens in sequences of `length`."""
    # A power of two near the wanted tokens of a step, then a multiple of the GPUs.
    step_tokens = min(_LARGEST_STEP, read / _STEPS)
    sequences = max(_SMALLEST_BATCH, 2 ** round(math.log2(max(1.0, step_tokens / length))))
    # Every rank must have the same number of sequences in a step.
    batch = cluster.gpus * max(1, round(sequences / cluster.gpus))

    # A rule of thumb: the rate falls with the square root of the width. It lies between a constant
    # rate and muP's 1 / width for matrices (Yang et al. 2022).
    rate = _PAPER_RATE * math.sqrt(_PAPER_HIDDEN_SIZE / spec.widths.hidden_size)
    schedule: dict[str, Any] = {
        "steps": max(1, round(read / (batch * length))),
        "global_batch_size": batch,
        "micro_batch_size": 1,
    }
    if by_muon:
        rate *= MUON_RATE_FACTOR
        schedule["optimizer"] = "muon"
    schedule["learning_rate"] = float(f"{rate:.1e}")
    return schedule
