"""What a study is: one YAML file of configs/studies/, checked whole before anything starts."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from pipeline.config.method import Method
from pipeline.config.reading import NonNegativeInt, PositiveFloat, PositiveInt, Section, checked, read_yaml
from pipeline.errors import ConfigError
from pipeline.sizing.matching import MethodName

RunSettings = dict[str, Any]
"""Some of a run configuration's settings; what is missing, the study says."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
_LISTED_IN = "docs/studies.md"
SCRATCH, TOKENS = "scratch", "tokens"
_TAKEN = {SCRATCH, TOKENS}
# Settings that come from elsewhere in the file: in a run's own they would go unheard, or make two runs share a folder.
_FROM_STUDY = ("name", "folder", "base")
_VARIED = ("method", "seed", "schedule.learning_rate")


class TokenizerText(Section):
    """What a tokenizer learns from, of one kind."""

    input: Annotated[list[str], Field(min_length=1)]
    """files or patterns, as a corpus has them"""
    text_key: str = "text"
    """the field or column that holds the text"""
    mib: PositiveFloat
    """about so much of it"""


class NewTokenizer(Section):
    """A tokenizer (BPE with byte fallback) that is trained for the study."""

    vocab_size: PositiveInt
    """pieces in all"""
    texts: Annotated[list[TokenizerText], Field(min_length=1)]
    """in the proportion that the base shall have"""


class Scratch(Section):
    """A base that does not exist yet: an architecture with random weights, to be trained by the stages."""

    architecture: Path
    """a Hugging Face config.json; its vocabulary is the tokenizer's"""
    tokenizer: NewTokenizer | Path
    """one to train, or a folder or file that holds one"""
    seed: NonNegativeInt = 0
    """of the random weights"""


class Stage(Section):
    """A run that makes the base of what comes after it, from the base before it."""

    ranks: PositiveInt = 1
    """processes on this machine; on a cluster the allocation decides"""
    settings: RunSettings
    """a run configuration without name, folder and base; without a method it is full fine-tuning"""

    @model_validator(mode="after")
    def _says_what_is_its_own(self) -> Stage:
        _check_not_said(self.settings, _FROM_STUDY)
        return self


class Compared(Section):
    """One of the methods that a study compares."""

    label: Annotated[str, Field(min_length=1)]
    """for tables"""
    method: Method | None = Field(default=None, description="that section of a run configuration")
    matched: MethodName | None = Field(
        default=None, description="instead: this method, of the size that trains as much as that of the study's `match`"
    )
    learning_rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    """the one that leaves the new corpus at the lowest held-out perplexity, with the first seed, is taken"""

    @model_validator(mode="after")
    def _one_method_and_rates(self) -> Compared:
        if (self.method is None) == (self.matched is None):
            raise ValueError("give method or matched, one of them")
        if len({f"{rate:g}" for rate in self.learning_rates}) < len(self.learning_rates):
            raise ValueError("learning_rates: each once")
        return self


class Study(Section):
    """A base, however it comes to be, and the runs on it that are compared."""

    name: Name
    """of letters, digits, dashes, underscores"""
    folder: Path
    """everything that the study writes: a folder a run, and summary.json"""
    base: Path | None = Field(default=None, description="a Hugging Face folder; or else `scratch`")
    scratch: Scratch | None = Field(default=None, description="the base is made from nothing")
    stages: dict[Name, Stage] = Field(default={}, description="runs that make the base, one after the other, by name")
    settings: RunSettings
    """of all compared runs: a run configuration without name, folder, base, method, seed and learning rate"""
    ranks: PositiveInt = 1
    """processes of a compared run on this machine; on a cluster the allocation decides"""
    match: Name | None = Field(default=None, description="whose count of trained parameters those `matched` follow")
    methods: Annotated[dict[Name, Compared], Field(min_length=1)]
    """what is compared, by name"""
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)]
    """of the data order, the same for every method, and of random initial values"""

    @model_validator(mode="after")
    def _fits_together(self) -> Study:
        if (self.base is None) == (self.scratch is None):
            raise ValueError("give base or scratch, one of them")
        if self.scratch is not None and not self.stages:
            raise ValueError("a base from scratch needs stages that train it")
        if taken := _TAKEN & self.stages.keys():
            raise ValueError(f"stages.{min(taken)}: the study has a folder of that name for something else")
        _check_not_said(self.settings, (*_FROM_STUDY, *_VARIED))
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: each once")
        labels = [one.label for one in self.methods.values()]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"methods: each needs a label of its own, or tables pool them, found {twice[0]!r} twice")
        if any(one.matched for one in self.methods.values()):
            reference = self.methods.get(self.match or "")
            if reference is None or reference.method is None:
                raise ValueError(
                    f"match: expected one of the methods that has a section of its own, found {self.match}"
                )
        return self


def load_study(path: Path, data: Path) -> Study:
    """Reads and checks the YAML file at `path`; `${data}` in its texts stands for the folder `data`.

    Raises:
        ConfigError: the file is missing, does not describe a study, or needs a folder of texts that is not there.
    """
    values = read_yaml(path)
    placed = _placed(values, {"data": str(data)}, path)
    if placed != values and not data.is_dir():
        raise ConfigError(
            f"--data {data}: no such folder; {path} reads its texts from there: name where they lie, as DATA=folder "
            "of make, or --data folder"
        )
    return checked(Study, placed, source=str(path), listed_in=_LISTED_IN)


def _check_not_said(settings: RunSettings, keys: Iterable[str]) -> None:
    """Raises ValueError where `settings` say one of `keys`, dotted ones below a section."""
    for key in keys:
        section, _, name = key.rpartition(".")
        inner = settings.get(section) if section else settings
        if isinstance(inner, Mapping) and name in inner:
            raise ValueError(f"settings.{key}: every run has its own, which the study decides; remove it here")


def _placed(value: Any, places: Mapping[str, str], path: Path) -> Any:  # noqa: ANN401  # any YAML
    """`value` with every `${name}` in its texts replaced."""
    match value:
        case str():
            try:
                return string.Template(value).substitute(places)
            except (KeyError, ValueError):
                raise ConfigError(f"{path}: {value!r}: expected no other place than ${{data}}") from None
        case list():
            return [_placed(one, places, path) for one in value]
        case dict():
            return {key: _placed(one, places, path) for key, one in value.items()}
    return value
