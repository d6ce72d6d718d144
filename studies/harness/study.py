"""What a study is: one YAML file of studies/configs/, checked whole before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from pipeline.config.method import Method
from pipeline.config.reading import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    checked,
    flattened,
)
from pipeline.config.sources import read_settings
from pipeline.errors import ConfigError

RunSettings = dict[str, Any]
"""Some of a run configuration's settings; the study provides the rest."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
SCRATCH, TOKENS = "scratch", "tokens"
"""Folders of a study: the base with random weights, and the tokenized corpora."""


def _without(*keys: str) -> AfterValidator:
    """Refuses settings that contain one of `keys`, dotted ones in a section."""

    def check(settings: RunSettings) -> RunSettings:
        for given, _ in flattened(settings):
            for key in keys:
                if f"{given}.".startswith(f"{key}."):
                    raise ValueError(f"{key}: the study sets it for every run; remove it here")
        return settings

    return AfterValidator(check)


def _each_once(values: list[Any]) -> list[Any]:
    names = {
        f"{value:g}" if isinstance(value, float) else value for value in values
    }  # as folders have them
    if len(names) < len(values):
        raise ValueError("each once")
    return values


# The study decides these; given in `settings` they would be ignored, or make two runs share a folder.
_FROM_STUDY = ("name", "folder", "base")
StageSettings = Annotated[RunSettings, _without(*_FROM_STUDY)]
ComparedSettings = Annotated[
    RunSettings, _without(*_FROM_STUDY, "method", "seed", "schedule.learning_rate")
]


class TokenizerText(Section):
    """One kind of text that a tokenizer is trained on."""

    input: Annotated[list[str], Field(min_length=1)]
    """files or patterns, as a corpus has them"""
    text_key: str = "text"
    """the field or column that holds the text"""
    mib: PositiveFloat
    """how much of it is read, roughly"""


class NewTokenizer(Section):
    """A tokenizer (BPE with byte fallback) that is trained for the study."""

    vocab_size: PositiveInt
    """pieces in all"""
    texts: Annotated[list[TokenizerText], Field(min_length=1)]
    """in the proportions of the base's training data"""
    start_token: bool = False
    """put <s> before every document, as Llama does; from it the base can write text of its own"""


class RandomBase(Section):
    """A base with random weights, which the stages train."""

    architecture: Path
    """a Hugging Face config.json; its vocabulary is the tokenizer's"""
    tokenizer: NewTokenizer | Path
    """one to train, or the folder or file of an existing one"""
    seed: NonNegativeInt = 0
    """of the random weights"""


class Stage(Section):
    """A run that trains the base further before the methods are compared."""

    ranks: PositiveInt = 1
    """processes on this machine; on a cluster the allocation decides"""
    settings: StageSettings
    """a run configuration without name, folder and base; the default method is full fine-tuning"""


class Compared(Section):
    """One of the methods that a study compares."""

    label: Annotated[str, Field(min_length=1)]
    """for tables"""
    method: Method
    """that section of a run configuration"""
    learning_rates: Annotated[list[PositiveFloat], Field(min_length=1), AfterValidator(_each_once)]
    """the rate with the lowest held-out perplexity of the new corpus, with the first seed, is chosen"""
    settings: ComparedSettings = {}
    """what differs from the study's `settings`, such as another share of replay"""
    averages: list[Annotated[float, Field(gt=0, lt=1)]] = []
    """of full fine-tuning: shares of the trained weights in averages with the base's, a row each"""
    chosen_by: Name | None = None
    """a method with a gate that, for each held-out document, chooses the base or this method's model: one more row"""


class Study(Section):
    """A base, given or trained by the study, and the runs on it that are compared."""

    name: Name
    """of letters, digits, dashes, underscores"""
    folder: Path
    """everything that the study writes: one folder per run, and summary.json"""
    base: Path | None = None
    """a Hugging Face folder or a model on the hub; or else `scratch`"""
    scratch: RandomBase | None = None
    """the base starts from random weights"""
    stages: dict[Name, Stage] = {}
    """runs that train the base, in this order, by name"""
    settings: ComparedSettings
    """of all compared runs: a run configuration without name, folder, base, method, seed and learning rate"""
    ranks: PositiveInt = 1
    """processes of a compared run on this machine; on a cluster the allocation decides"""
    methods: Annotated[dict[Name, Compared], Field(min_length=1)]
    """what is compared, by name"""
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_each_once)]
    """of the data order, the same for every method, and of random initial values"""

    @model_validator(mode="after")
    def _is_consistent(self) -> Study:
        if (self.base is None) == (self.scratch is None):
            raise ValueError("give base or scratch, one of them")
        if taken := {SCRATCH, TOKENS} & self.stages.keys():
            raise ValueError(
                f"stages.{min(taken)}: the study uses a folder of that name itself; choose another name"
            )
        for name, compared in self.methods.items():
            if compared.averages and compared.method.name != "fft":
                raise ValueError(
                    f"methods.{name}.averages: only of method fft, whose parameters are the base's own"
                )
            if (gated := compared.chosen_by) is not None and not (
                gated in self.methods and (self.settings | self.methods[gated].settings).get("gate")
            ):
                raise ValueError(f"methods.{name}.chosen_by: {gated} is no method here with a gate")
        labels = [compared.label for compared in self.methods.values()]
        if repeated := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(
                f"methods: expected a different label for each, found {repeated[0]!r} twice"
            )
        return self


def load_study(path: Path, data: Path) -> Study:
    """Reads and checks the YAML file at `path`; `${data}` in its strings is replaced by the folder `data`.

    Raises:
        ConfigError: the file is missing or does not describe a study, or `data` is needed and missing.
    """
    text = json.dumps(read_settings(path), default=str)
    if (place := "${data}") in text and not data.is_dir():
        raise ConfigError(
            f"--data {data}: no such folder; {path} reads its texts from there: give their folder as --data, or as "
            "DATA= of make"
        )
    values = json.loads(text.replace(place, json.dumps(str(data))[1:-1]))
    return checked(Study, values, source=str(path), listed_in="docs/studies.md")
