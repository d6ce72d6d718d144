"""The settings of a small copy of a run: few steps, little text, all else as in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config.changed_steps import with_fitting_steps
from pipeline.config.data import Corpus
from pipeline.config.gate import GateSettings
from pipeline.config.run import RunConfig, parse_config
from pipeline.config.validation import ValidationSettings
from pipeline.trial.texts import beginnings

_HELDOUT_FRACTION = 0.05
"""The least share of cut text that is held out: a run's 0.005 of it may be no document."""
_SEQUENCES = 16
"""The most sequences of a held-out part that a validation scores."""
_QUESTIONS = 10
"""The most questions of each of lm-eval's tasks."""
_GATE_TOKENS = 20_000
"""The most tokens of each kind of text on which the gate is fitted."""
_OPEN_FRACTION = 0.01
"""The least share of other text on which the gate may open."""


def small_run(
    config: RunConfig, folder: Path, texts: Path, *, steps: int, ranks: int, text_bytes: int
) -> RunConfig:
    """A run in `folder` that goes through the same stages as `config`.

    Args:
        config: the run.
        folder: the folder of the small run, which will also hold its tokens.
        texts: an empty folder for the beginnings of large corpora.
        steps: how many steps it trains.
        ranks: how many ranks train it; a step has a micro-batch of each.
        text_bytes: about how much text of each corpus it reads.

    Raises:
        ConfigError: the run has more stages than `steps`.
        DataError: an input of a corpus is missing, empty, or of an unknown format.
    """
    before = config.model_dump(mode="json", exclude_unset=True)
    values: dict[str, Any] = {**before, "folder": str(folder)}
    for unwanted in ("observers", "profile"):
        values.pop(unwanted, None)
    _shrink_schedule(values, config, steps=steps, ranks=ranks)

    corpora: dict[str, dict[str, Any]] = {}
    is_any_cut = False
    tokens = steps * values["schedule"]["global_batch_size"] * config.data.sequence_length
    for name, corpus in config.data.corpora.items():
        settings, is_cut = _small_corpus(corpus, texts / name, tokens, text_bytes)
        corpora[name] = {**before["data"]["corpora"][name], **settings}
        is_any_cut = is_any_cut or is_cut
    values["data"] = {**before["data"], "folder": str(folder / "tokens"), "corpora": corpora}

    values["validation"] = _small_validation(config.validation, before.get("validation", {}), steps)
    every = {"every_steps": max(1, steps // 2), "keep_every_steps": None}
    values["checkpoints"] = {**before.get("checkpoints", {}), **every}
    # What so few steps do to old text says nothing of the run.
    values["forgetting"] = {**before.get("forgetting", {}), "action": "warn"}
    if config.gate is not None:
        values["gate"] = {**before["gate"], **_small_gate(config.gate)}
    open_rows = before["method"].get("open_rows")
    if is_any_cut and isinstance(open_rows, dict):
        # In less text every token is rarer.
        values["method"] = {**before["method"], "open_rows": {**open_rows, "min_count": 1}}
    return parse_config(values, source=f"a small copy of {config.name}")


def _small_corpus(
    corpus: Corpus, folder: Path, tokens: int, text_bytes: int
) -> tuple[dict[str, Any], bool]:
    """What changes of a corpus, and whether it reads less text.

    The beginnings of its files are written to `folder`; the base writes at most `tokens`.
    """
    changed: dict[str, Any] = {"epochs": None, "token_budget": None}
    is_cut = False
    for name, inputs in (("input", corpus.input), ("heldout_input", corpus.heldout_input)):
        files = beginnings(inputs, corpus, folder / name, text_bytes) if inputs else None
        if files is not None:
            changed[name] = files
            is_cut = True
    if is_cut and corpus.heldout_fraction > 0:
        changed["heldout_fraction"] = max(corpus.heldout_fraction, _HELDOUT_FRACTION)
    if corpus.sample is not None:
        few = {"tokens": min(corpus.sample.tokens, tokens)}
        changed["sample"] = {**corpus.sample.model_dump(mode="json", exclude_unset=True), **few}
    return changed, is_cut


def _small_validation(
    validation: ValidationSettings, before: dict[str, Any], steps: int
) -> dict[str, Any]:
    """The section `validation`: one in the middle and one at the end, on few texts."""
    changed = {**before, "every_steps": max(1, steps // 2)}
    changed["max_sequences"] = min(validation.max_sequences, _SEQUENCES)
    if validation.tasks:
        changed["tasks_limit"] = min(validation.tasks_limit or _QUESTIONS, _QUESTIONS)
    # It would not end the run within so few steps.
    for name in ("stop_after", "cool_down_steps"):
        changed.pop(name, None)
    return changed


def _small_gate(gate: GateSettings) -> dict[str, Any]:
    """What changes of the section `gate`: less text, which cannot show so small a share of it."""
    return {
        "tokens": min(gate.tokens, _GATE_TOKENS),
        "max_open_fraction": max(gate.max_open_fraction, _OPEN_FRACTION),
    }


def _shrink_schedule(values: dict[str, Any], config: RunConfig, *, steps: int, ranks: int) -> None:
    """Gives the run, and each of its stages, few steps of a micro-batch of each rank."""
    schedule = dict(values["schedule"])
    dp_size = max(1, ranks // config.parallel.tp_size)
    schedule["steps"] = steps
    schedule["global_batch_size"] = config.schedule.micro_batch_size * dp_size
    stages = [dict(stage) for stage in values.get("stages", [])]
    for stage, settings in zip(stages, config.stages, strict=True):
        stage.pop("global_batch_size", None)
        if settings.micro_batch_size is not None:
            stage["global_batch_size"] = settings.micro_batch_size * dp_size
    values["schedule"] = schedule
    if stages:
        before = {"schedule": config.schedule.model_dump(), "stages": stages}
        fitting = with_fitting_steps(before, {"schedule": schedule, "stages": stages})
        values["stages"] = fitting["stages"]
