"""The sections `schedule` and `stages` of a first configuration."""

from __future__ import annotations

import math
from typing import Any

from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.first_config.texts import TextMeasure, tokens_to_read

_PAPER_HIDDEN_SIZE = 2048
_PAPER_RATE = 1e-3
_LONGEST = 8192
_SHORTEST = 64
"""Bounds of a sequence's length in tokens."""
_SEQUENCES = 4096
"""Sequences that a run reads at least, if its texts suffice: shorter ones make more of them."""
_STEPS = 1000
_LARGEST_STEP = 2**22
"""Tokens of a step of the paper's run; smaller runs make about _STEPS smaller steps."""
_SMALLEST_BATCH = 8
_PASSES_OF_CHATS = 2
_SHARE_OF_CHATS = 3 / 4
_RATE_OF_CHATS = 1 / 3
"""How often chats in the new language are read after the texts, their share of the sequences there,
and the learning rate as a share of the texts' own (docs/results/chat.md)."""


def stages_section(
    schedule: dict[str, Any], length: int, tuned: TextMeasure
) -> list[dict[str, Any]]:
    """The stages of a run that learns texts as `schedule` says, and then chats.

    In the second some of the texts are read on, so that what they taught stays.
    """
    read = _PASSES_OF_CHATS * tuned.tokens / _SHARE_OF_CHATS
    steps = max(1, round(read / (schedule["global_batch_size"] * length)))
    rate = float(f"{schedule['learning_rate'] * _RATE_OF_CHATS:.1e}")
    # Weights of which new_chats has its share.
    weights = {"new": 1, "new_chats": round(_SHARE_OF_CHATS / (1 - _SHARE_OF_CHATS))}
    # The base's own answers there would be learned against better ones.
    weights["self_generated_new_chats"] = 0
    return [
        {"name": "texts", "steps": schedule["steps"], "weights": {"new_chats": 0}},
        {"name": "chats", "steps": steps, "learning_rate": rate, "weights": weights},
    ]


def schedule_section(
    learned: TextMeasure, spec: DecoderSpec, cluster: Cluster
) -> tuple[dict[str, Any], int]:
    """The section `schedule`, and the length of a sequence."""
    read = tokens_to_read(learned)
    length = min(_LONGEST, 2 ** int(math.log2(spec.max_position_embeddings)))
    while read < _SEQUENCES * length and length > _SHORTEST:
        length //= 2

    # A power of two near the wanted tokens of a step, then a multiple of the GPUs.
    step_tokens = min(_LARGEST_STEP, read / _STEPS)
    sequences = max(_SMALLEST_BATCH, 2 ** round(math.log2(max(1.0, step_tokens / length))))
    # Every rank must have the same number of sequences in a step.
    batch = cluster.gpus * max(1, round(sequences / cluster.gpus))

    # The rule of thumb that rates fall with the square root of the width: between none, and the 1 /
    # width of muP for matrices (Yang et al. 2022).
    rate = _PAPER_RATE * math.sqrt(_PAPER_HIDDEN_SIZE / spec.widths.hidden_size)
    schedule = {
        "steps": max(1, round(read / (batch * length))),
        "global_batch_size": batch,
        "micro_batch_size": 1,
        "learning_rate": float(f"{rate:.1e}"),
    }
    return schedule, length
