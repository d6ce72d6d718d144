"""The runs of a study: each an ordinary run in a folder of its own; which are pending, by what those folders hold.

No other state is kept. It is determined again whenever a run ends, by one process or by a chain of jobs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.checks.inputs import check_fits
from pipeline.config.data import Role
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, load_config, parse_config
from pipeline.config.sources import RUN_FILE, merged
from pipeline.conversion.convert import HF_FOLDER, VERIFICATION
from pipeline.data.corpora import has_heldout, is_tokenized, named_inputs, unfinished_corpora
from pipeline.data.units import input_files
from pipeline.errors import CONFIG_ERROR, USER_ERROR, CheckpointError, ConfigError, StudyError
from pipeline.files import write_text
from pipeline.model.from_hf import read_spec
from pipeline.run_folder.metrics import METRICS, History, geometric_mean, read_history
from pipeline.run_folder.status import is_trained, read_status
from pipeline.scale.gate_folder import GATE_FOLDER, open_record
from pipeline.studies.study import SCRATCH, TOKENS, RunSettings, Study
from pipeline.training.divergence import REPORT as DIVERGENCE


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
    def folder(self) -> Path:
        return self.config.folder

    @property
    def path(self) -> Path:
        return self.folder / RUN_FILE

    def write(self) -> None:
        """Writes the configuration into the run's folder. Raises as `check_same` once there are checkpoints."""
        if (self.folder / "checkpoints").exists():
            self.check_same()
        if not self.path.exists() or load_config(self.path, base="named") != self.config:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.path, yaml.safe_dump(self.settings, allow_unicode=True, sort_keys=False))

    def check_same(self) -> None:
        """Raises ConfigError where the folder holds a run with other settings, which would be taken for this one."""
        if not self.path.exists():
            return
        found, wanted = comparable(load_config(self.path, base="named")), comparable(self.config)
        if changed := [key for key in wanted if found[key] != wanted[key]]:
            raise ConfigError(
                f"{self.path}: this run was made with other settings than the study has now ({', '.join(changed)}); "
                f"remove the folder {self.folder}, or give the study another one"
            )

    @property
    def is_trained(self) -> bool:
        """Whether the run is trained to its end. Raises as `check_same`."""
        if not is_trained(self.folder):
            return False
        self.check_same()
        return True

    @property
    def has_diverged(self) -> bool:
        """Whether the run ended because its loss diverged."""
        return (self.folder / DIVERGENCE).exists() and not self.is_trained

    @property
    def is_converted(self) -> bool:
        return self.is_trained and (self.folder / HF_FOLDER / VERIFICATION).exists()

    @property
    def has_its_gate(self) -> bool:
        """Whether the run has no gate, or one of these settings: others may be given to a finished run."""
        if self.config.gate is None:
            return True
        try:
            request = open_record(self.folder / GATE_FOLDER).request
        except CheckpointError:
            return False
        return request.get("settings") == self.config.gate.model_dump(mode="json")

    @property
    def training_stages(self) -> tuple[str, ...]:
        """The stages of slurm/cpt_korean.sh that train it."""
        upscaling = ("upscale",) if isinstance(self.config.method, ScaleMethod) else ()
        return (*upscaling, "train", *(("gate",) if self.config.gate else ()))

    def history(self) -> History:
        """The metrics of a finished run, with its validations from step 0 to the last step.

        Raises:
            RunFolderError: its metrics are missing or damaged.
        """
        return read_history(self.folder / METRICS)

    def perplexity(self, role: Role) -> float:
        """The geometric mean at the end over a role's held-out corpora, infinite where one is. Raises likewise."""
        figures, corpora = self.history().validations[-1].figures, self.config.data.corpora
        return geometric_mean([figures[name]["perplexity"] for name in figures if corpora[name].role == role])


def comparable(config: RunConfig) -> dict[str, Any]:
    """What a run is trained with, with absolute paths of texts, so that their spelling does not count.

    A gate may be added to a finished run.
    """
    values = config.model_dump(exclude={"gate"})
    for corpus in values["data"]["corpora"].values():
        for section, part in ((corpus, "input"), (corpus, "heldout_input"), (corpus["sample"] or {}, "openings")):
            if part in section:
                section[part] = [str(Path(path).resolve()) for path in section[part]]
    return values


@dataclass(frozen=True)
class Task:
    """Some stages of slurm/cpt_korean.sh for one run; `ranks` is the number of processes on this machine."""

    run: StudyRun
    stages: tuple[str, ...]
    ranks: int

    @property
    def name(self) -> str:
        """The run's name, and the stages where training is not among them."""
        folder = self.run.folder.name
        return folder if "train" in self.stages else f"{folder}: {' '.join(self.stages)}"


class StudyRuns:
    """The runs that `study` describes; `source` is its file, for error messages.

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
            self.base = self.stages[-1].folder / HF_FOLDER
        self._first = {name: self.trial(self.grid(name)[0]) for name in study.methods}
        for data in (run.config.data for run in self._first.values()):
            if not any(corpus.role == "new" and has_heldout(data, name) for name, corpus in data.corpora.items()):
                raise ConfigError(
                    f"{source}: settings.data.corpora: expected a held-out part of a corpus of role new, by which "
                    "learning rates are chosen, found none; set heldout_input or heldout_fraction"
                )

    def trial(self, trial: Trial) -> StudyRun:
        """The run of that trial."""
        compared = self.study.methods[trial.method]
        varied = {
            "method": compared.method.model_dump(mode="json", exclude_none=True),
            "seed": trial.seed,
            "schedule": {"learning_rate": trial.learning_rate},
        }
        settings = merged(merged(self.study.settings, compared.settings), varied)
        return self._run(str(trial), settings, f"settings, for {trial.method}")

    def _run(self, name: str, settings: RunSettings, where: str) -> StudyRun:
        own = {"name": f"{self.study.name}.{name}", "folder": str(self.study.folder / name), "base": str(self.base)}
        shared = {"data": {"folder": str(self.study.folder / TOKENS)}}
        values = merged(own, merged(shared, settings))
        return StudyRun(values, parse_config(values, source=f"{self.source}: {where}"))

    def check(self) -> None:
        """Checks every method against the base, if that exists yet, and looks for all texts, before the first run.

        Raises:
            ConfigError: the base cannot be trained by one of the methods.
            DataError: a file that is yet to be tokenized is missing, empty, or of an unknown format.
        """
        for name, run in self._first.items() if self.base.exists() else ():
            try:
                check_fits(run.config, read_spec(self.base))
            except ConfigError as error:
                raise ConfigError(f"{self.source}: methods.{name}: {error}") from None
        for run in (*self.stages, *self._first.values()):
            for files in () if is_tokenized(run.config.data) else named_inputs(run.config.data):
                input_files(files)

    def grid(self, method: str) -> list[Trial]:
        """The runs among which the learning rate of `method` is chosen."""
        return [Trial(method, rate, self.study.seeds[0]) for rate in self.study.methods[method].learning_rates]

    def chosen_rate(self, method: str) -> float | None:
        """The learning rate at which `method` learned most, whatever it forgot, the lower one of equal ones.

        None until all runs of its grid are finished.

        Raises:
            StudyError: all of them diverged.
        """
        trials = sorted(self.grid(method), key=lambda trial: trial.learning_rate)
        if len(trials) == 1:
            return trials[0].learning_rate
        if not all(map(self.is_over, trials)):
            return None
        runs = {trial.learning_rate: self.trial(trial) for trial in trials}
        perplexities = {rate: run.perplexity("new") for rate, run in runs.items() if not run.has_diverged}
        if not perplexities:
            raise StudyError(
                f"methods.{method}: every one of its learning_rates diverged; give lower ones", CONFIG_ERROR
            )
        return min(perplexities, key=perplexities.__getitem__)

    def known_trials(self) -> list[Trial]:
        """The runs of every grid of learning rates, and those of the other seeds where the rate is chosen."""
        trials = []
        for name in self.study.methods:
            trials += self.grid(name)
            if (rate := self.chosen_rate(name)) is not None:
                trials += [Trial(name, rate, seed) for seed in self.study.seeds[1:]]
        return trials

    def is_over(self, trial: Trial) -> bool:
        """Whether nothing is left to do: trained and its gate fitted, or diverged at one of several learning rates."""
        run, grid = self.trial(trial), self.grid(trial.method)
        if run.is_trained:
            return run.has_its_gate
        return trial in grid and len(grid) > 1 and run.has_diverged

    def pending_tasks(self) -> list[Task]:
        """The tasks that can start now, all at the same time; empty where the study is finished.

        Raises:
            StudyError: a method diverged at every learning rate.
        """
        for run, stage in zip(self.stages, self.study.stages.values(), strict=True):
            if not run.is_converted:
                sampling = ("sample",) if any(corpus.sample for corpus in run.config.data.corpora.values()) else ()
                return [Task(run, ("tokenize", *sampling, *run.training_stages, "convert"), stage.ranks)]
        trials = self.known_trials()
        first = self.trial(trials[0])
        # The compared runs share their base and their corpora. Sampling is a task of its own: tokenizing needs no GPU.
        corpora = first.config.data.corpora
        unfinished = [corpora[name] for name in unfinished_corpora(first.config.data)]
        if unfinished:
            if all(corpus.sample is not None for corpus in unfinished):
                return [Task(first, ("sample",), 1)]
            return [Task(first, (*(["clean"] if any(corpus.clean for corpus in unfinished) else []), "tokenize"), 1)]
        pending = [self.trial(trial) for trial in trials if not self.is_over(trial)]
        return [Task(run, run.training_stages, self.study.ranks) for run in pending]

    def pending_after(self, ended: Collection[str]) -> list[Task]:
        """The tasks that can start now that the jobs of the tasks with the names `ended` are over.

        A task is not submitted twice, however its job ended: an error, `scancel`, a lost node.

        Raises:
            StudyError: some of `ended` are still pending.
        """
        tasks = self.pending_tasks()
        unfinished = [task for task in tasks if task.name in ended]
        if not unfinished:
            return tasks
        first, *others = unfinished
        status = read_status(first.run.folder)
        also = f" (nor are {', '.join(task.name for task in others)})" if others else ""
        raise StudyError(
            f"{first.name}: its job has ended, but the run is not finished{also}; the run is {status.state}: "
            f"{status.why}; the output of its job says more; submit the study again to continue with what is left",
            USER_ERROR,
        )

    def run_count(self) -> int:
        """How many runs the study has in all, those that train the base included."""
        methods = self.study.methods.values()
        return len(self.stages) + sum(len(own.learning_rates) + len(self.study.seeds) - 1 for own in methods)

    def finished_count(self) -> int:
        """How many of them are finished."""
        stages = sum(run.is_converted for run in self.stages)
        return stages + (sum(map(self.is_over, self.known_trials())) if stages == len(self.stages) else 0)
