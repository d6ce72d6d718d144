"""The configuration of one base with several expansions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .configuration_scale import ScaleConfig

NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
"""What an expansion may be called: its name is that of a folder."""


class CombinedConfig(ScaleConfig):
    """The base's sizes, an expansion of none, and the entries of a ScaleConfig for each of
    `expansions`.

    `active` are the names of those that may open; None: all.
    """

    model_type = "scale_combined"

    def __init__(self, **kwargs: Any) -> None:
        self.expansions: dict[str, dict[str, Any]] = kwargs.pop("expansions", {})
        self.active: list[str] | None = kwargs.pop("active", None)
        super().__init__(**kwargs)

    def backbone_unsupported_reason(self) -> str | None:
        """Why the logits are no product of one hidden state and one matrix."""
        return "a model with several expansions is for inference"

    def names(self) -> list[str]:
        """The expansions to be loaded: the active ones, and those whose vocabulary the tokenizer
        has.

        Sorted, as a config that was saved again is, so that every new token keeps its id.

        Raises:
            ValueError: a name that is not there, or that names no folder.
        """
        for name in self.expansions:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"expansions: expected names of ASCII letters, digits, - and _, found {name!r}"
                )
        active = list(self.expansions)
        if self.active is not None:
            active = chosen(self.active, self.expansions)
        loaded = []
        for name in sorted(self.expansions):
            own = self.expansions[name]
            has_new_tokens = own["vocab_size"] > own["base_vocab_size"]
            if name in active or has_new_tokens:
                loaded.append(name)
        return loaded


def chosen(names: Iterable[str], among: Iterable[str], of_folder: Iterable[str] = ()) -> list[str]:
    """`names`, or one name, as a list.

    Args:
        names: what is asked for.
        among: the names there are.
        of_folder: the names that the folder has, of which some may not be loaded.

    Raises:
        ValueError: a name is not `among` those there are.
    """
    listed = [names] if isinstance(names, str) else list(names)
    there = list(among)
    for name in listed:
        if name not in there:
            advice = ""
            if name in of_folder:
                advice = f"; {name} was not loaded: load without active="
            raise ValueError(
                f"active: expected some of {', '.join(there) or 'no expansion'}, found "
                f"{name}{advice}"
            )
    return listed
