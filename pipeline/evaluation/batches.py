"""Which texts may share a batch: those that a model reads there as it reads each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

Item = TypeVar("Item")


def frequency_context(config: Any) -> int | None:  # of any class
    """The longest text, in tokens, before a model's rotary frequencies change (longrope); None: they never do.

    transformers chooses the frequencies of a whole batch by its longest text, padding included.
    """
    own = getattr(config, "rotary", None) or ()  # of a model in the format scale
    contexts = [spec["context"] for spec in own]
    parameters = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    for one in (parameters, *parameters.values()):  # some models have several, by the kind of layer
        if isinstance(one, Mapping) and "longrope" in (one.get("rope_type"), one.get("type")):
            contexts.append(
                one.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
    return min((int(context) for context in contexts if context is not None), default=None)


def frequencies_of(length: int, new: int, context: int | None) -> int:
    """Equal for texts of `length` tokens, continued by at most `new`, that a batch may hold beside each other.

    A text that outgrows the `context` of `frequency_context` may only be beside texts of its own length.
    """
    if context is None or length + new <= context:
        return 0
    return -1 if length > context else length


def first_alike(items: Sequence[Item], kind: Callable[[Item], object], most: int) -> list[Item]:
    """The first of `items`, and those that follow it and are of its `kind`, at most so many."""
    first = kind(items[0])
    alike: Iterable[Item] = takewhile(lambda item: kind(item) == first, items[:most])
    return list(alike)
