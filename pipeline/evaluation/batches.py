"""Which texts may share a batch.

With longrope (Phi-3) a model has other rotary frequencies for texts that are longer than a context,
and transformers chooses those of a whole batch by its longest text, padding included: beside a
longer text, a text would have other scores than alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from transformers import CONFIG_MAPPING

from pipeline.hf.remote_code.scale_longrope import longrope_contexts

Item = TypeVar("Item")


def frequency_context(config: Any) -> int | None:  # of any class
    """The longest text, in tokens, before a model's rotary frequencies change (longrope).

    None: they never change.
    """
    # A multimodal model, and a base with a full difference, describe the text part on its own.
    contexts = longrope_contexts(config.get_text_config(decoder=True))
    base = getattr(config, "base_config", None)
    if base is not None:  # the base's own config.json, of a hosted model
        base_config = CONFIG_MAPPING[base["model_type"]].from_dict(copy.deepcopy(base))
        contexts += longrope_contexts(base_config.get_text_config(decoder=True))
    return min(contexts, default=None)


def frequencies_of(length: int, new: int, context: int | None) -> int:
    """A number that is equal for two texts if they may share a batch.

    Args:
        length: tokens of the text.
        new: by how many tokens it is continued at most.
        context: from `frequency_context`.
    """
    if context is None or length + new <= context:
        # It has the short frequencies to its end.
        return 0
    if length > context:
        # It has the long frequencies from the start, whatever its length.
        return -1
    # It outgrows the context while it is written: only texts of its length do so at the same token.
    return length


def first_alike(items: Sequence[Item], kind: Callable[[Item], object], most: int) -> list[Item]:
    """The first of `items`, and those directly after it of its `kind`; at most `most` in all."""
    alike: list[Item] = []
    for item in items[:most]:
        if kind(item) != kind(items[0]):
            break
        alike.append(item)
    return alike
