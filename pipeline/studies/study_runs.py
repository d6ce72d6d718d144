"""The runs of a study: each an ordinary run configuration in a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipeline import log
from pipeline.checks.inputs import check_fits
from pipeline.config.data import Role
from pipeline.config.method import FullFineTuning, Method
from pipeline.config.run import RunConfig, load_config, parse_config
from pipeline.config.sources import merged
from pipeline.conversion.convert import HF_FOLDER
from pipeline.data.corpora import has_heldout, is_tokenized, named_inputs
from pipeline.data.units import input_files
from pipeline.errors import ConfigError
from pipeline.files import write_text
from pipeline.model.from_hf import read_spec
from pipeline.sizing.matching import MethodName, matched
from pipeline.studies.study import SCRATCH, TOKENS, RunSettings, Study

_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Trial:
    """A compared run: which method, at which learning rate, with which seed."""

    method: str
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.method}.lr_{self.learning_rate:g}.seed_{self.seed}"


@dataclass(frozen=True)
class StudyRun:
    """One run: its settings as they are written to `path`, and the configuration that they describe."""

    settings: RunSettings
    config: RunConfig

    @property
    def path(self) -> Path:
        return self.config.folder / "run.yaml"

    def check_same(self) -> None:
        """Raises ConfigError where the folder holds a run with other settings, which would be taken for this one."""
        if not self.path.exists():
            return
        found, wanted = _comparable(load_config(self.path, base="named")), _comparable(self.config)
        if changed := [key for key in wanted if found[key] != wanted[key]]:
            raise ConfigError(
                f"{self.path}: this run was made with other settings than the study has now ({', '.join(changed)}); "
                f"remove the folder {self.config.folder}, or give the study another one"
            )

    def write(self) -> None:
        """Writes the configuration into the run's folder.

        Raises:
            ConfigError: the folder holds checkpoints of a run with other settings.
        """
        if (self.config.folder / "checkpoints").exists():
            self.check_same()
        if self.path.exists() and load_config(self.path, base="named") == self.config:
            return
        self.config.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path, yaml.safe_dump(self.settings, allow_unicode=True, sort_keys=False))


class StudyRuns:
    """Makes the runs that `study` describes; `source` is its file, for error messages.

    Raises:
        ConfigError: one of the runs has no valid configuration, or nothing to choose learning rates by.
    """

    def __init__(self, study: Study, source: str) -> None:
        self.study = study
        self.source = source
        self.stages: list[StudyRun] = []
        self.base = study.base or study.folder / SCRATCH
        """of the compared runs"""
        for name, stage in study.stages.items():
            settings = merged({"method": {"name": "fft"}}, stage.settings)
            self.stages.append(self._run(name, settings, f"stages.{name}.settings"))
            self.base = self.stages[-1].config.folder / HF_FOLDER
        for name, compared in study.methods.items():
            # The size of a matched method is not known yet, and cannot be wrong.
            run = self._first_run(name, compared.method or FullFineTuning(name="fft"))
            if not measured_corpora(run.config, "new"):
                raise ConfigError(
                    f"{source}: settings.data.corpora: expected a held-out part of a corpus of role new, by which "
                    "learning rates are chosen, found none; set heldout_input or heldout_fraction"
                )

    @cached_property
    def methods(self) -> dict[str, Method]:
        """The section `method` of each compared method, in the study's order; the base's architecture must be known."""
        compared = self.study.methods
        given = {name: own.method for name, own in compared.items() if own.method is not None}
        found = {name: self._matched(own.matched) for name, own in compared.items() if own.matched}
        return {name: given.get(name) or found[name] for name in compared}

    def trial(self, trial: Trial) -> StudyRun:
        """The run of that trial."""
        return self._run_of(trial, self.methods[trial.method])

    def check_fits_base(self) -> None:
        """Checks every method against the base, if that exists yet, before the first one trains for hours.

        Raises:
            ConfigError: the base cannot be trained by one of the methods. Those that are `matched` always fit.
        """
        if not self.base.exists():
            return
        spec = read_spec(self.base)
        for name, compared in self.study.methods.items():
            if compared.method is not None:
                try:
                    check_fits(self._first_run(name, compared.method).config, spec)
                except ConfigError as error:
                    raise ConfigError(f"{self.source}: methods.{name}: {error}") from None

    def check_inputs(self) -> None:
        """Looks for all texts that are yet to be tokenized, before the first is.

        Raises:
            DataError: a file is missing, empty, or of an unknown format.
        """
        fft = FullFineTuning(name="fft")
        first = [self._first_run(name, compared.method or fft) for name, compared in self.study.methods.items()]
        untokenized = [run.config.data for run in [*self.stages, *first] if not is_tokenized(run.config.data)]
        for files in dict.fromkeys(tuple(files) for data in untokenized for files in named_inputs(data)):
            input_files(files)

    def _matched(self, name: MethodName) -> Method:
        """The method `name`, of the size that trains as many parameters as the study's method `match`."""
        reference = self.study.match or ""
        method = self.study.methods[reference].method
        assert method is not None  # the study was checked
        return matched(name, self._first_run(reference, method).config, read_spec(self.base))

    def _first_run(self, name: str, method: Method) -> StudyRun:
        return self._run_of(Trial(name, self.study.methods[name].learning_rates[0], self.study.seeds[0]), method)

    def _run_of(self, trial: Trial, method: Method) -> StudyRun:
        varied = {
            "method": method.model_dump(mode="json", exclude_none=True),
            "seed": trial.seed,
            "schedule": {"learning_rate": trial.learning_rate},
        }
        settings = merged(self.study.settings, self.study.methods[trial.method].settings)
        return self._run(str(trial), merged(settings, varied), f"settings, for {trial.method}")

    def _run(self, name: str, settings: RunSettings, where: str) -> StudyRun:
        own = {"name": f"{self.study.name}.{name}", "folder": str(self.study.folder / name), "base": str(self.base)}
        shared = {"data": {"folder": str(self.study.folder / TOKENS)}}
        values = merged(own, merged(shared, settings))
        return StudyRun(values, parse_config(values, source=f"{self.source}: {where}"))


def measured_corpora(config: RunConfig, role: Role) -> list[str]:
    """The corpora of that role that have a held-out part."""
    data = config.data
    return [name for name, corpus in data.corpora.items() if corpus.role == role and has_heldout(data, name)]


def _comparable(config: RunConfig) -> dict[str, Any]:
    """What a run is trained with, with absolute paths of texts, so that their spelling does not count.

    A gate may be added to a finished run.
    """
    values = config.model_dump(exclude={"gate"})
    for corpus in values["data"]["corpora"].values():
        for section, part in ((corpus, "input"), (corpus, "heldout_input"), (corpus["sample"] or {}, "openings")):
            if part in section:
                section[part] = [str(Path(path).resolve()) for path in section[part]]
    return values
