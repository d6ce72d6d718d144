"""What `scale-cpt evaluate` scores models by, beside texts: an option such as --tasks for each."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pipeline.config.run import RunConfig
from pipeline.errors import ExtensionError
from pipeline.extension import extensions, load_instance

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
        scores_runs: whether it also scores a run; then it has `run_evaluation`, and summary.json an
            entry of the name of its option.
    """

    help: str
    after: Literal["--model", "--data"] = "--data"
    title: str
    scores_runs: bool = False

    @abstractmethod
    def add_options(self, group: argparse._ArgumentGroup) -> None:
        """Adds its further options."""

    @abstractmethod
    def scores(self, arguments: argparse.Namespace) -> Mapping[str, Any]:
        """The scores of each of `arguments.model`, by its name, as JSON can hold them."""

    @abstractmethod
    def table(self, scores: Mapping[str, Any]) -> str:
        """A table of what `scores` returned, for a terminal."""

    def run_evaluation(self, config: RunConfig, arguments: argparse.Namespace) -> RunEvaluation:
        """What scores the base and the export of a run by these options."""
        raise NotImplementedError


class RunEvaluation(ABC):
    """What scores the base and the export of a run, for its summary and its model card.

    Attributes:
        title: of its section in the model card.
        scored: what it scores, the head of the first column there.
    """

    title: str
    scored: str

    @abstractmethod
    def read(self) -> None:
        """Reads what models are scored on, before any is scored; raises a UserError."""

    @abstractmethod
    def scores(self, folder: Path) -> Any:
        """The scores of the model in `folder`, as JSON can hold them."""

    @abstractmethod
    def rows(self, scores: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
        """The head of a table and its rows, of scores by the name of the model."""


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
            found[name] = load_instance(place, Evaluator)
    return found


def run_evaluators() -> list[str]:
    """The names of the evaluators that also score a run."""
    return [name for name, evaluator in evaluators().items() if evaluator.scores_runs]
