"""The runs of a study, each an ordinary run configuration in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipeline import log
from pipeline.config.data import Role
from pipeline.config.method import FullFineTuning, Method
from pipeline.config.run import RunConfig, load_config, parse_config
from pipeline.conversion.runs import HF_FOLDER
from pipeline.data.corpora import has_heldout
from pipeline.errors import ConfigError
from pipeline.estimation.matching import Matcher
from pipeline.files import write_text
from pipeline.model.from_hf import read_spec
from pipeline.planning.opening import check_fits
from pipeline.study.description import SCRATCH, TOKENS, RunSettings, Study

CONFIG = "run.yaml"
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class StudyRun:
    """One run: its settings as they are written, and what they describe."""

    settings: RunSettings
    config: RunConfig

    @property
    def path(self) -> Path:
        """Its configuration on the disk."""
        return self.config.folder / CONFIG

    def check_same(self) -> None:
        """Raises ConfigError where the folder holds a run with other settings, which would be taken for this one."""
        if not self.path.exists():
            return
        found, wanted = _compared(load_config(self.path)), _compared(self.config)
        if other := [key for key in wanted if found[key] != wanted[key]]:
            raise ConfigError(
                f"{self.path}: this run was made with other settings than the study has now ({', '.join(other)}); "
                f"remove the folder {self.config.folder}, or give the study another one"
            )

    def write(self) -> None:
        """Puts the configuration into the run's folder.

        Raises:
            ConfigError: the folder holds a run with other settings.
        """
        if (self.config.folder / "checkpoints").exists():
            self.check_same()
        if self.path.exists() and load_config(self.path) == self.config:
            return
        self.config.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path, yaml.safe_dump(self.settings, allow_unicode=True, sort_keys=False))


@dataclass(frozen=True)
class Trial:
    """A compared run: which method, at which learning rate, with which seed."""

    method: str
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.method}.lr_{self.learning_rate:g}.seed_{self.seed}"


class StudyRuns:
    """Makes the runs that `study` describes; `source` is its file, for errors."""

    def __init__(self, study: Study, source: str) -> None:
        self.study = study
        self.source = source
        self.stages = self._stages()
        self._check_trials()

    @property
    def base(self) -> Path:
        """The base of the compared runs."""
        return self.stages[-1].config.folder / HF_FOLDER if self.stages else self._first_base

    @property
    def _first_base(self) -> Path:
        return self.study.base or self.study.folder / SCRATCH

    @cached_property
    def methods(self) -> dict[str, Method]:
        """The section `method` of each compared method; the base's architecture must be known."""
        compared = self.study.methods
        methods = {name: one.method for name, one in compared.items() if one.method is not None}
        # In the order of the study, so that tables have it.
        return {name: methods.get(name) or self._matched(name) for name in compared}

    def check_fits_base(self) -> None:
        """Raises ConfigError where the base, if it is there, cannot be trained by one of the methods, before hours of
        the others; those that are `matched` are made to fit."""
        if not self.base.exists():
            return
        spec = read_spec(self.base)
        for name, compared in self.study.methods.items():
            if compared.method is None:
                continue
            run = self._trial(Trial(name, compared.learning_rates[0], self.study.seeds[0]), compared.method)
            try:
                check_fits(run.config, spec)
            except ConfigError as error:
                raise ConfigError(f"{self.source}: methods.{name}: {error}") from None

    def trial(self, trial: Trial) -> StudyRun:
        """The run of that trial."""
        return self._trial(trial, self.methods[trial.method])

    @cached_property
    def _matcher(self) -> Matcher:
        reference = self.study.match or next(iter(self.study.methods))
        method = self.study.methods[reference].method or FullFineTuning(name="fft")
        run = self._trial(Trial(reference, 1.0, 0), method)
        return Matcher(run.config, read_spec(self.base))

    def _matched(self, name: str) -> Method:
        wanted = self.study.methods[name].matched
        if wanted is None:
            raise AssertionError(f"{name} has a section of its own")
        (match,) = self._matcher.match([wanted])
        _logger.info(
            "%s: %s trained parameters, %+.1f %% off those of %s: %s",
            self.study.methods[name].label,
            f"{match.trained:,}",
            100 * match.off,
            self.study.match,
            match.settings.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        )
        return match.settings

    def _stages(self) -> list[StudyRun]:
        runs: list[StudyRun] = []
        base = self._first_base
        for name, stage in self.study.stages.items():
            settings = _merged({"method": {"name": "fft"}}, stage.settings)
            runs.append(self._run(name, base, settings, f"stages.{name}.settings"))
            base = runs[-1].config.folder / HF_FOLDER
        return runs

    def _check_trials(self) -> None:
        """Raises ConfigError where no run could be made, before anything starts."""
        for name, compared in self.study.methods.items():
            method = compared.method or FullFineTuning(name="fft")  # its size follows later, and has no faults
            run = self._trial(Trial(name, compared.learning_rates[0], self.study.seeds[0]), method)
            if not measured_corpora(run.config, "new"):
                raise ConfigError(
                    f"{self.source}: settings.data.corpora: expected a held-out part of a corpus of role new, by which "
                    "learning rates are chosen, found none; set heldout_input or heldout_fraction"
                )

    def _trial(self, trial: Trial, method: Method) -> StudyRun:
        settings = _merged(
            self.study.settings,
            {
                "method": method.model_dump(mode="json", exclude_none=True),
                "seed": trial.seed,
                "schedule": {"learning_rate": trial.learning_rate},
            },
        )
        return self._run(str(trial), self.base, settings, f"settings, for {trial.method}")

    def _run(self, name: str, base: Path, settings: RunSettings, where: str) -> StudyRun:
        folder = self.study.folder / name
        own = {"name": f"{self.study.name}.{name}", "folder": str(folder), "base": str(base)}
        shared = {"data": {"folder": str(self.study.folder / TOKENS)}}
        values = _merged(own, _merged(shared, settings))
        return StudyRun(values, parse_config(values, source=f"{self.source}: {where}"))


def measured_corpora(config: RunConfig, role: Role) -> list[str]:
    """The corpora of that role of which the run holds a part out."""
    data = config.data
    return [name for name, corpus in data.corpora.items() if corpus.role == role and has_heldout(data, name)]


def _compared(config: RunConfig) -> dict[str, Any]:
    """The sections of a configuration, however the places of its texts are written."""
    values = config.model_dump()
    for corpus in values["data"]["corpora"].values():
        for part in ("input", "heldout_input"):
            corpus[part] = [str(Path(place).resolve()) for place in corpus[part]]
    return values


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> RunSettings:
    """`settings` with `changes`, section by section."""
    merged = dict(settings)
    for key, value in changes.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping) and key != "method"
        merged[key] = _merged(inner, value) if both and inner is not None else value
    return merged
