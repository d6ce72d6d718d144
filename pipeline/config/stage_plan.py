"""The stages of a run in their order: the steps of each, and the settings with which it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.data import Data
from pipeline.config.run import RunConfig
from pipeline.config.stages import data_of, schedule_of


@dataclass(frozen=True)
class TrainingStage:
    """A stage of a run. A run without `stages` is one stage, without a name.

    Attributes:
        number: counted from 0.
        first_step: how many steps of the run come before it.
        config: the run as if this stage were all of it: its schedule, its data, what it trains.
        trained_before: the setting `trains` of each earlier stage.
        data_before: the data of the stage before it, if it begins with a passage from the
            proportions of that stage to its own; None without a passage.
        passage_steps: how many steps the passage takes.
    """

    number: int
    name: str
    first_step: int
    config: RunConfig
    trained_before: tuple[tuple[str, ...], ...] = ()
    data_before: Data | None = None
    passage_steps: int = 0

    @property
    def steps(self) -> int:
        return self.config.schedule.steps

    @property
    def end_step(self) -> int:
        """How many steps of the run are done when it ends."""
        return self.first_step + self.steps

    @property
    def tokens_per_step(self) -> int:
        return self.config.schedule.global_batch_size * self.config.data.sequence_length

    def __str__(self) -> str:
        """Its name and its steps, counted from 1."""
        return f"{self.name} (steps {self.first_step + 1} to {self.end_step})"


def training_stages(config: RunConfig) -> list[TrainingStage]:
    """The stages of a run, at least one."""
    if not config.stages:
        return [TrainingStage(0, "", 0, config)]
    stages: list[TrainingStage] = []
    first_step = 0
    trained_before: tuple[tuple[str, ...], ...] = ()
    for number, settings in enumerate(config.stages):
        # model_copy does not validate; `check_stages` has checked all stages when the run was read.
        changes = {
            "schedule": schedule_of(settings, config.schedule),
            "data": data_of(settings, config.data),
            "stages": [settings],
        }
        stage = TrainingStage(
            number=number,
            name=settings.name,
            first_step=first_step,
            config=config.model_copy(update=changes),
            trained_before=trained_before,
            data_before=stages[-1].config.data if settings.passage_steps else None,
            passage_steps=settings.passage_steps,
        )
        stages.append(stage)
        first_step = stage.end_step
        trained_before = (*trained_before, tuple(settings.trains))
    return stages


def stage_after(stages: Sequence[TrainingStage], step: int) -> TrainingStage:
    """The stage of the step after `step` steps; the last one where no step is left."""
    for stage in stages:
        if step < stage.end_step:
            return stage
    return stages[-1]


def tokens_after(stages: Sequence[TrainingStage], step: int) -> int:
    """How many tokens the first `step` steps of a run have."""
    tokens = 0
    for stage in stages:
        done = min(max(0, step - stage.first_step), stage.steps)
        tokens += done * stage.tokens_per_step
    return tokens
