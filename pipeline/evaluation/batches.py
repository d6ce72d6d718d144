"""Which texts may share a batch: those that a model reads there as it reads each alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def frequency_context(config: Any) -> int | None:  # of any class
    """The longest text, in tokens, before a model's rotary frequencies change (longrope).

    transformers chooses the frequencies of a whole batch by its longest text, padding included.
    None: the frequencies never change.
    """
    contexts: list[int] = []
    # Models in the format scale describe each kind of layer on their own.
    for spec in getattr(config, "rotary", None) or ():
        if spec["context"] is not None:
            contexts.append(int(spec["context"]))
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    # Some models of transformers have several sets of parameters, by the kind of layer.
    for part in (parameters, *(parameters or {}).values()):
        is_longrope = isinstance(part, Mapping) and "longrope" in (
            part.get("rope_type"),
            part.get("type"),
        )
        if is_longrope:
            context = (
                part.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
            contexts.append(int(context))
    return min(contexts, default=None)


def frequencies_of(length: int, new: int, context: int | None) -> int:
    """A number that is equal for texts that a batch may hold beside each other.

    A text of `length` tokens is continued by at most `new`. One that outgrows the `context` of
    `frequency_context` on the way may only be beside texts of its own length.
    """
    if context is None or length + new <= context:
        return 0
    # Beyond the context from the start, all have the long frequencies, whatever their length.
    return -1 if length > context else length


def first_alike(items: Sequence[Item], kind: Callable[[Item], object], most: int) -> list[Item]:
    """The first of `items`, and those directly after it of its `kind`; at most `most` in all."""
    alike: list[Item] = []
    for item in items[:most]:
        if kind(item) != kind(items[0]):
            break
        alike.append(item)
    return alike
