"""The steps of a run in stages after `--set` changed their sum, or those of one stage.

A file gives both, and they must agree. On the command line one of them is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import log
from pipeline.errors import ConfigError

_logger = log.get_logger(__name__)


def with_fitting_steps(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `after`, which the command line made of `before`, with steps that agree.

    New `schedule.steps` divide over the stages as before. New steps of stages add up to
    `schedule.steps`. Settings that are no steps at all are left to the checks of a run.

    Raises:
        ConfigError: there are fewer steps than stages.
    """
    settings = dict(after)
    steps = _steps_of_run(after)
    of_stages = _steps_of_stages(after)
    if steps is None or not of_stages or sum(of_stages) == steps:
        return settings
    stages_changed = of_stages != _steps_of_stages(before)
    if stages_changed and steps == _steps_of_run(before):
        settings["schedule"] = {**after["schedule"], "steps": sum(of_stages)}
        _logger.info("the stages have %d steps: schedule.steps is that", sum(of_stages))
    elif not stages_changed:
        settings["stages"] = _divided(after["stages"], steps)
        shown = [f"{stage['name']} {stage['steps']}" for stage in settings["stages"]]
        _logger.info("schedule.steps %d divides over the stages: %s", steps, ", ".join(shown))
    return settings


def _steps_of_run(settings: Mapping[str, Any]) -> int | None:
    """`schedule.steps`; None if it is no number above 0."""
    schedule = settings.get("schedule")
    steps = schedule.get("steps") if isinstance(schedule, Mapping) else None
    return steps if _is_count(steps) else None


def _steps_of_stages(settings: Mapping[str, Any]) -> list[int]:
    """The steps of each stage; empty if one of them has no number above 0, or no name."""
    found: list[int] = []
    stages = settings.get("stages")
    for stage in stages if isinstance(stages, list) else []:
        if (
            not isinstance(stage, Mapping)
            or "name" not in stage
            or not _is_count(stage.get("steps"))
        ):
            return []
        found.append(stage["steps"])
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _divided(stages: Sequence[Mapping[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The stages with `steps` in all: one for each, and the others in proportion to their own."""
    if steps < len(stages):
        raise ConfigError(
            f"schedule.steps: found {steps}, expected at least one for each of the {len(stages)} "
            "stages"
        )
    of_all = sum(stage["steps"] for stage in stages)
    divided: list[dict[str, Any]] = []
    before = 0
    end_before = 0
    for number, stage in enumerate(stages, start=1):
        before += stage["steps"]
        # Rounded at the ends of stages, so that the last one ends with the run.
        end = number + round((steps - len(stages)) * before / of_all)
        changed = {**stage, "steps": end - end_before}
        passage = stage.get("passage_steps")
        if _is_count(passage):
            share = passage / stage["steps"]
            changed["passage_steps"] = max(1, round(share * changed["steps"]))
        divided.append(changed)
        end_before = end
    return divided
