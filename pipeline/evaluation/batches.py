"""Which texts may share a batch.

A batch has the rotary frequencies of its longest text. With longrope (Phi-3) they change with the
length, so that a text would have other scores in a batch than alone.
"""

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
        if _is_longrope(part):
            context = (
                part.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
            contexts.append(int(context))
    return min(contexts, default=None)


def _is_longrope(parameters: Any) -> bool:
    """Whether an entry of a model's rotary parameters is a set of them, of the kind longrope."""
    if not isinstance(parameters, Mapping):
        return False
    # `type` is the name that transformers before 4.43 wrote.
    return "longrope" in (parameters.get("rope_type"), parameters.get("type"))


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
