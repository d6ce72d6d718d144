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
SCRATCH = "scratch"
"""The folder of the base with random weights, in a study's folder."""
TOKENS = "tokens"
"""The folder of the tokenized corpora, in a study's folder."""


def _without(*keys: str) -> AfterValidator:
    """Refuses settings that contain one of `keys`; a dotted key is one of a section."""

    def check(settings: RunSettings) -> RunSettings:
        for given, _ in flattened(settings):
            for key in keys:
                if f"{given}.".startswith(f"{key}."):
                    raise ValueError(f"{key}: the study sets it for every run; remove it here")
        return settings

    return AfterValidator(check)


def _each_once(values: list[Any]) -> list[Any]:
    names: set[str] = set()
    for value in values:
        # Rates are compared as the names of the runs' folders have them.
        names.add(f"{value:g}" if isinstance(value, float) else str(value))
    if len(names) < len(values):
        raise ValueError("each once")
    return values


# The study decides these. In `settings` they would be ignored, or make two runs share a folder.
_FROM_STUDY = ("name", "folder", "base")
StageSettings = Annotated[RunSettings, _without(*_FROM_STUDY)]
ComparedSettings = Annotated[
    RunSettings, _without(*_FROM_STUDY, "method", "seed", "schedule.learning_rate")
]


class TokenizerText(Section):
    """One kind of text that a tokenizer is trained on."""

    input: Annotated[list[str], Field(min_length=1)]
    """the files, or patterns of files, that hold the text"""
    text_key: str = "text"
    """the field or column that holds the text"""
    mib: PositiveFloat
    """roughly how many MiB of the text are read"""


class NewTokenizer(Section):
    """A tokenizer (BPE with byte fallback) that is trained for the study."""

    vocab_size: PositiveInt
    """how many tokens the vocabulary has in all"""
    texts: Annotated[list[TokenizerText], Field(min_length=1)]
    """the texts to train on, in the proportions of the base's training data"""
    start_token: bool = False
    """put <s> before every document, as Llama does; the base can then generate text from it"""


class RandomBase(Section):
    """A base with random weights, which the stages train."""

    architecture: Path
    """a Hugging Face config.json; the vocabulary size is replaced by the tokenizer's"""
    tokenizer: NewTokenizer | Path
    """a tokenizer to train, or the folder or file of an existing one"""
    seed: NonNegativeInt = 0
    """the seed of the random weights"""


class BaseStage(Section):
    """A run that trains the base further before the methods are compared."""

    ranks: PositiveInt = 1
    """how many processes train it on this machine; on a cluster the allocation decides"""
    settings: StageSettings
    """a run configuration without name, folder and base; the default method is full fine-tuning"""


class Compared(Section):
    """One of the methods that a study compares."""

    label: Annotated[str, Field(min_length=1)]
    """the name of the method in tables and figures"""
    method: Method
    """the section `method` of a run configuration"""
    learning_rates: Annotated[list[PositiveFloat], Field(min_length=1), AfterValidator(_each_once)]
    """the rates to try with the first seed; that with the lowest held-out perplexity of the new
    corpora is chosen"""
    settings: ComparedSettings = {}
    """what differs from the study's `settings`, such as another share of replay"""
    averages: list[Annotated[float, Field(gt=0, lt=1)]] = []
    """for full fine-tuning only: each is the share of the trained weights in an average with the
    base's, which is scored in a row of its own"""
    chosen_by: Name | None = None
    """a method whose gate chooses, for each held-out document, the base or this method's model;
    the result has a row of its own"""


class Study(Section):
    """A base, given or trained by the study, and the runs on it that are compared."""

    name: Name
    """the name of the study, of letters, digits, dashes, underscores"""
    folder: Path
    """the folder of everything that the study writes: one folder for each run, and summary.json"""
    base: Path | None = None
    """a Hugging Face folder, or a model on the hub; give this or `scratch`"""
    scratch: RandomBase | None = None
    """a base with random weights, which the stages train; give this or `base`"""
    stages: dict[Name, BaseStage] = {}
    """the runs that train the base, by name, in this order"""
    settings: ComparedSettings
    """the run configuration of all compared runs, without name, folder, base, method, seed and
    learning rate"""
    ranks: PositiveInt = 1
    """how many processes a compared run has on this machine; on a cluster the allocation decides"""
    methods: Annotated[dict[Name, Compared], Field(min_length=1)]
    """the methods that are compared, by name"""
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_each_once)]
    """the seeds of the data order, which is the same for every method, and of random values"""

    @model_validator(mode="after")
    def _is_consistent(self) -> Study:
        if (self.base is None) == (self.scratch is None):
            raise ValueError("give base or scratch, one of them")
        for name in sorted(self.stages):
            if name in (SCRATCH, TOKENS):
                raise ValueError(
                    f"stages.{name}: the study uses a folder of that name itself; choose "
                    "another name"
                )
        for name, compared in self.methods.items():
            # Other methods add weights, of which the base has none.
            if compared.averages and compared.method.name != "fft":
                raise ValueError(
                    f"methods.{name}.averages: only of method fft, whose parameters are the "
                    "base's own"
                )
            if compared.chosen_by is not None and not self._has_gate(compared.chosen_by):
                raise ValueError(
                    f"methods.{name}.chosen_by: {compared.chosen_by} is no method here with a gate"
                )
        # Tables and figures know a method by its label alone.
        labels: set[str] = set()
        for compared in self.methods.values():
            if compared.label in labels:
                raise ValueError(
                    f"methods: expected a different label for each, found {compared.label!r} twice"
                )
            labels.add(compared.label)
        return self

    def _has_gate(self, method: str) -> bool:
        if method not in self.methods:
            return False
        settings = self.settings | self.methods[method].settings
        return bool(settings.get("gate"))


def load_study(path: Path, data: Path) -> Study:
    """Reads and checks the YAML file at `path`; `data` replaces `${data}` in its strings.

    Raises:
        ConfigError: the file is missing or does not describe a study, or the folder `data` is
            needed and missing.
    """
    placeholder = "${data}"
    text = json.dumps(read_settings(path), default=str)
    if placeholder in text and not data.is_dir():
        raise ConfigError(
            f"--data {data}: no such folder; {path} reads its texts from there: give their folder "
            "as --data, or as DATA= of make"
        )
    # As JSON has it in a string: a folder's name may have quotes and backslashes.
    without_quotes = json.dumps(str(data))[1:-1]
    values = json.loads(text.replace(placeholder, without_quotes))
    return checked(Study, values, source=str(path), listed_in="docs/studies.md")
