"""The section `stages` of a run configuration: what trains when, on which data, at which rate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from pipeline.config.data import Corpus, CorpusName, Data
from pipeline.config.reading import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Texts,
    with_todays_kinds,
)
from pipeline.config.schedule import DecayShape, Schedule

_OF_SCHEDULE = (
    "steps",
    "learning_rate",
    "decay",
    "warmup_fraction",
    "decay_fraction",
    "final_learning_rate_fraction",
    "global_batch_size",
    "micro_batch_size",
)
_OF_DATA = ("sequence_length", "replay_fraction", "self_generated_fraction")


class Stage(Section):
    """A stage of the training (docs/stages.md). What it leaves out is as in `schedule` and
    `data`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """letters, digits, dots, dashes and underscores"""
    steps: PositiveInt
    """optimizer steps; those of all stages add up to schedule.steps"""
    trains: Annotated[Texts, AfterValidator(with_todays_kinds), AfterValidator(list)] = []
    """parameters that train, by kind of block (`new_tokens`) or pattern of names
    (`output.new_rows`); default: all of the method's"""
    learning_rate: PositiveFloat | None = None
    """in place of schedule.learning_rate"""
    decay: DecayShape | None = None
    """in place of schedule.decay"""
    warmup_fraction: Fraction | None = None
    """in place of schedule.warmup_fraction: share of the stage's steps"""
    decay_fraction: Fraction | None = None
    """in place of schedule.decay_fraction: share of the stage's steps"""
    final_learning_rate_fraction: Fraction | None = None
    """in place of schedule.final_learning_rate_fraction: share of the stage's peak"""
    global_batch_size: PositiveInt | None = None
    """in place of schedule.global_batch_size"""
    micro_batch_size: PositiveInt | None = None
    """in place of schedule.micro_batch_size"""
    sequence_length: PositiveInt | None = None
    """in place of data.sequence_length, which validations always have"""
    weights: dict[CorpusName, Annotated[float, Field(ge=0)]] = {}
    """in place of data.corpora.<name>.weight; a corpus of weight 0 is not read"""
    replay_fraction: Fraction | None = None
    """in place of data.replay_fraction"""
    self_generated_fraction: Fraction | None = None
    """in place of data.self_generated_fraction"""
    passage_steps: NonNegativeInt = 0
    """first steps, over which the proportions of the corpora change linearly from those before"""


def schedule_of(stage: Stage, schedule: Schedule) -> Schedule:
    """The schedule of one stage of a run that has `schedule`."""
    own = {name: getattr(stage, name) for name in _OF_SCHEDULE}
    return schedule.model_copy(update=_set(own))


def data_of(stage: Stage, data: Data) -> Data:
    """The data of one stage of a run that has `data`: the corpora that it reads, and how.

    Raises:
        ValueError: a weight is of no corpus of `data`, or the corpora and fractions do not fit
            together.
    """
    for name in stage.weights:
        if name not in data.corpora:
            raise ValueError(
                f"weights: {name} is no corpus of data.corpora; expected {', '.join(data.corpora)}"
            )
    corpora: dict[str, Corpus] = {}
    for name, corpus in data.corpora.items():
        weight = stage.weights.get(name, corpus.weight)
        if weight > 0:
            corpora[name] = corpus.model_copy(update={"weight": weight})
    own = _set({name: getattr(stage, name) for name in _OF_DATA})
    try:
        # Validated again: without the corpora of a role, its share of the samples may be invalid.
        return Data.model_validate({**dict(data), **own, "corpora": corpora})
    except ValidationError as error:
        raise ValueError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None


def check_stages(stages: Sequence[Stage], schedule: Schedule, data: Data) -> None:
    """Checks that the stages of a run fit together, and that each setting has an effect.

    Raises:
        ValueError: they do not; the message begins with the name of the setting.
    """
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"stages: two have the name {name}; give each another name")
    steps = sum(stage.steps for stage in stages)
    if steps != schedule.steps:
        raise ValueError(
            f"stages: their steps add up to {steps}, but schedule.steps is {schedule.steps}; make "
            "them equal"
        )
    data_of_stages: list[Data] = []
    for stage in stages:
        try:
            data_of_stages.append(data_of(stage, data))
        except ValueError as error:
            raise ValueError(f"stages.{stage.name}: {error}") from None
    for name in data.corpora:
        if not any(name in part.corpora for part in data_of_stages):
            raise ValueError(
                f"data.corpora.{name}: no stage reads it, all give it weight 0; remove it, or give "
                "it a weight in a stage"
            )
    _check_passage(stages[0], None, data_of_stages[0])
    for stage, (before, after) in zip(stages[1:], pairwise(data_of_stages), strict=True):
        _check_passage(stage, before, after)


def _check_passage(stage: Stage, before: Data | None, after: Data) -> None:
    """Checks `passage_steps` of a stage; `before` is the data of the stage before it.

    Raises:
        ValueError: there is nothing to pass from, or the loss would change within the passage.
    """
    if stage.passage_steps == 0:
        return
    setting = f"stages.{stage.name}.passage_steps"
    if before is None:
        raise ValueError(f"{setting}: no stage comes before the first one; remove it")
    if stage.passage_steps > stage.steps:
        raise ValueError(
            f"{setting}: found {stage.passage_steps}, expected at most the stage's "
            f"{stage.steps} steps"
        )
    if proportions(before) == proportions(after):
        raise ValueError(
            f"{setting}: the stage before has the same weights and fractions; remove it, or change "
            "them"
        )
    if (before.kl_fraction > 0) != (after.kl_fraction > 0):
        raise ValueError(
            f"{setting}: one of the two stages trains by KL(base || model) and the other does not; "
            "remove it, or give both a fraction of such text"
        )


def proportions(data: Data) -> tuple[dict[str, float], dict[str, float]]:
    """The weights of the corpora and the fractions of their roles, by name."""
    weights = {name: corpus.weight for name, corpus in data.corpora.items()}
    return weights, {str(role): fraction for role, fraction in data.fractions.items()}


def _set(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that have a value."""
    return {name: value for name, value in settings.items() if value is not None}
