"""The section `validation`: held-out text, prompts and tasks during a run."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from pipeline.config.data import CorpusName
from pipeline.config.reading import NonNegativeInt, PositiveInt, Section


class ValidationSettings(Section):
    """Held-out perplexity during the run, for each corpus with a held-out part."""

    every_steps: PositiveInt = 100
    """steps between validations; there is also one at the start and the end"""
    max_sequences: PositiveInt = 64
    """sequences that are scored of each held-out part"""
    probe: CorpusName | None = None
    """corpus on whose first held-out batch the drift from the base is measured; default: the first
    of role replay"""
    prompts: list[str] = []
    """texts that are continued greedily at each validation, for TensorBoard and trackers"""
    prompt_tokens: PositiveInt = 64
    """tokens of each continuation"""
    tasks: list[str] = []
    """tasks of lm-eval that are scored during training (docs/evaluation.md)"""
    tasks_every: PositiveInt = 1
    """validations from one with tasks to the next; the first and last have them"""
    tasks_limit: PositiveInt | None = None
    """first questions of each task that are asked; default: all"""
    few_shot: NonNegativeInt | None = None
    """solved examples before each question; default: the task's own number"""
    tasks_folder: Path | None = None
    """further tasks in lm-eval's format, whose Python code is run"""
    stop_after: PositiveInt | None = None
    """validations in a row without a lower nll_per_token of new text after which the run cools down
    and ends (docs/stability.md); default: never"""
    cool_down_steps: NonNegativeInt = 0
    """steps over which the rate then falls to its final value"""

    @model_validator(mode="after")
    def _settings_belong_together(self) -> ValidationSettings:
        if self.cool_down_steps and self.stop_after is None:
            raise ValueError("cool_down_steps: belongs to stop_after; set it, or remove this")
        if self.tasks_folder is not None and not self.tasks:
            raise ValueError("tasks_folder: belongs to tasks; name some, or remove it")
        if any(not prompt.strip() for prompt in self.prompts):
            raise ValueError("prompts: expected texts, found an empty one")
        return self
