"""What `scale-cpt evaluate` scores models by, beside texts: an option such as --tasks for each."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pipeline.errors import ExtensionError
from pipeline.extension import extensions, load_object

TEXTS = "data"
"""The core's own option, in place of that of an evaluator."""


class Evaluator(ABC):
    """A way to score models, which an option with at least one value chooses.

    Its module is imported with the options of the command. So it imports what it scores with, such
    as torch, within its methods.

    Attributes:
        help: one line for the option that chooses it.
        after: the option that this one follows in `--help`.
        title: of the group of its further options in `--help`.
    """

    help: str
    after: Literal["--model", "--data"] = "--data"
    title: str

    @abstractmethod
    def add_options(self, group: argparse._ArgumentGroup) -> None:
        """Adds its further options."""

    @abstractmethod
    def scores(self, arguments: argparse.Namespace) -> Mapping[str, Any]:
        """The scores of each of `arguments.model`, by its name, as JSON can hold them."""

    @abstractmethod
    def table(self, scores: Mapping[str, Any]) -> str:
        """A table of what `scores` returned, for a terminal."""


@cache
def evaluators() -> Mapping[str, Evaluator]:
    """The evaluators of the installed extensions, by the names of their options.

    Raises:
        ExtensionError: an extension cannot be used, or has an evaluator of a name that is there.
    """
    found: dict[str, Evaluator] = {}
    for extension in extensions():
        for name, place in extension.evaluators().items():
            if name in found or name == TEXTS:
                raise ExtensionError(
                    f"extension {extension.name}: its evaluator {name} is there already; give it "
                    "another name"
                )
            found[name] = load_object(place)
    return found
