"""The runs of a study, each an ordinary run in a folder of its own, and which of them are pending.

What the folders hold says which. No other state is kept: it is determined again whenever a run
ends, by one process or by a chain of jobs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checks.model_fit import check_fits
from pipeline.config.data import Data
from pipeline.config.method import starts_from_expansion
from pipeline.config.run import RunConfig, load_config, parse_config
from pipeline.config.sources import CHECKPOINTS, RUN_FILE, merged
from pipeline.conversion.convert import HF_FOLDER
from pipeline.conversion.export_format import VERIFICATION
from pipeline.data.tokenize.corpora import (
    has_heldout,
    is_tokenized,
    named_inputs,
    unfinished_corpora,
)
from pipeline.data.tokenize.input_files import input_files
from pipeline.errors import CONFIG_ERROR, CheckpointError, ConfigError, StudyError
from pipeline.gating.folder import GATE_FOLDER, open_record
from pipeline.hub import source_of
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.from_hf import read_spec
from pipeline.run_folder.metrics import METRICS, geometric_mean, read_history
from pipeline.run_folder.run_file import write_run
from pipeline.run_folder.status import is_trained, read_status
from pipeline.training.divergence import REPORT as DIVERGENCE
from studies.harness.study import SCRATCH, TOKENS, RunSettings, Study


@dataclass(frozen=True)
class StudyRun:
    """One run; `method` is the name that a compared run's method has in the study."""

    config: RunConfig
    method: str = ""

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def path(self) -> Path:
        return self.folder / RUN_FILE

    def write(self) -> None:
        """Writes the configuration into the run's folder.

        Raises:
            ConfigError: the folder has checkpoints of a run with other settings.
        """
        if (self.folder / CHECKPOINTS).exists():
            self.check_same()
        write_run(self.config)

    def check_same(self) -> None:
        """Checks that a run in the folder is this one.

        Raises:
            ConfigError: it has other settings, and would be taken for this one.
        """
        if not self.path.exists():
            return
        found = _compared_settings(load_config(self.path, base="named"))
        wanted = _compared_settings(self.config)
        changed = [key for key in wanted if found[key] != wanted[key]]
        if changed:
            # Its figures would stand in the study's tables as those of the settings of today.
            raise ConfigError(
                f"{self.path}: this run was made with other settings than the study has now "
                f"({', '.join(changed)}); remove the folder {self.folder}, or give the study "
                "another one"
            )

    @property
    def is_trained(self) -> bool:
        """Whether the run is trained to its end.

        Raises:
            ConfigError: the trained run in its folder has other settings.
        """
        if not is_trained(self.folder):
            return False
        self.check_same()
        return True

    @property
    def has_diverged(self) -> bool:
        return (self.folder / DIVERGENCE).exists() and not self.is_trained

    @property
    def is_converted(self) -> bool:
        return self.is_trained and (self.folder / HF_FOLDER / VERIFICATION).exists()

    @property
    def has_its_gate(self) -> bool:
        """Whether the run is to have no gate, or has one with these settings.

        A finished run may get other settings of its gate, which is then fitted again.
        """
        if self.config.gate is None:
            return True
        try:
            settings = open_record(self.folder / GATE_FOLDER).request.get("settings")
        except CheckpointError:
            return False
        return bool(settings == self.config.gate.model_dump(mode="json"))

    @property
    def training_stages(self) -> tuple[str, ...]:
        """The stages of slurm/cpt_korean.sh that train it."""
        stages = ["train"]
        if starts_from_expansion(self.config.method):
            stages.insert(0, "upscale")
        if self.config.gate is not None:
            stages.append("gate")
        return tuple(stages)

    def perplexity(self) -> float:
        """The geometric mean over the held-out new corpora at the end, infinite where one is.

        Raises:
            RunFolderError: the run's metrics are missing or damaged.
        """
        at_end = read_history(self.folder / METRICS).validations[-1]
        perplexities: list[float] = []
        for name, figures in at_end.figures.items():
            if self.config.data.corpora[name].role == "new":
                perplexities.append(figures["perplexity"])
        return geometric_mean(perplexities)


def _compared_settings(config: RunConfig) -> dict[str, Any]:
    """The settings by which a run in a folder is recognised."""
    # Without the gate, which may be added to a finished run.
    settings = config.model_dump(exclude={"gate"})
    # Models of the hub by their names, as the study's file has them.
    settings["base"] = _source(settings["base"])
    vocabulary = settings["vocabulary"]
    if vocabulary is not None:
        vocabulary["folder"] = _source(vocabulary["folder"])
    return settings


def _source(folder: Path | str) -> str:
    return source_of(Path(folder)) or str(folder)


@dataclass(frozen=True)
class Task:
    """Some stages of slurm/cpt_korean.sh for one run, by `ranks` processes on this machine."""

    run: StudyRun
    stages: tuple[str, ...]
    ranks: int

    @property
    def name(self) -> str:
        """The run's name, and the stages where training is not among them."""
        if "train" in self.stages:
            return self.run.name
        return f"{self.run.name}: {' '.join(self.stages)}"


class StudyRuns:
    """The runs that `study` describes.

    Attributes:
        source: the study's file, for error messages.
        stages: the runs that train the base.
        base: the base of the compared runs.

    Raises:
        ConfigError: one of the runs has no valid configuration, or no held-out text to choose
            learning rates by.
    """

    def __init__(self, study: Study, source: str) -> None:
        self.study = study
        self.source = source
        self.stages: list[StudyRun] = []
        self.base = study.base or study.folder / SCRATCH
        for name, stage in study.stages.items():
            # A stage trains the model of the stage before it, and the last one's is the base.
            settings = merged({"method": {"name": "fft"}}, stage.settings)
            self.stages.append(self._run(name, settings, f"stages.{name}.settings"))
            self.base = self.stages[-1].folder / HF_FOLDER
        # A run of each method: one learning rate is as valid as another.
        self._first = {name: self.grid(name)[0] for name in study.methods}
        for run in self._first.values():
            self._check_heldout(run.config.data)

    def _check_heldout(self, data: Data) -> None:
        for name, corpus in data.corpora.items():
            if corpus.role == "new" and has_heldout(data, name):
                return
        raise ConfigError(
            f"{self.source}: settings.data.corpora: expected a held-out part of a corpus of role "
            "new, by which learning rates are chosen, found none; set heldout_input or "
            "heldout_fraction"
        )

    def compared(self, method: str, learning_rate: float, seed: int) -> StudyRun:
        """The run of a method at that learning rate, with that seed."""
        compared = self.study.methods[method]
        varied = {
            "method": compared.method.model_dump(mode="json", exclude_none=True),
            "seed": seed,
            "schedule": {"learning_rate": learning_rate},
        }
        settings = merged(merged(self.study.settings, compared.settings), varied)
        name = f"{method}.lr_{learning_rate:g}.seed_{seed}"
        return self._run(name, settings, f"settings, for {method}", method)

    def _run(self, name: str, settings: RunSettings, where: str, method: str = "") -> StudyRun:
        folder = self.study.folder
        own = {
            "name": f"{self.study.name}.{name}",
            "folder": str(folder / name),
            "base": str(self.base),
            "data": {"folder": str(folder / TOKENS)},
        }
        values = merged(own, settings)
        return StudyRun(parse_config(values, source=f"{self.source}: {where}"), method)

    def check(self) -> None:
        """Checks every method against the base, if that exists yet, and looks for all texts.

        Raises:
            ConfigError: the base cannot be trained by one of the methods.
            DataError: a file that is not tokenized yet is missing, empty, or of an unknown format;
                or an extended vocabulary is missing or damaged.
        """
        if self.base.exists():
            spec = read_spec(self.base)
            for name, run in self._first.items():
                try:
                    check_fits(run.config, extended_spec(run.config, spec))
                except ConfigError as error:
                    raise ConfigError(f"{self.source}: methods.{name}: {error}") from None
        for run in (*self.stages, *self._first.values()):
            if not is_tokenized(run.config.data):
                for files in named_inputs(run.config.data):
                    input_files(files)

    def grid(self, method: str) -> list[StudyRun]:
        """The runs among which the learning rate of `method` is chosen."""
        runs: list[StudyRun] = []
        for rate in self.study.methods[method].learning_rates:
            runs.append(self.compared(method, rate, self.study.seeds[0]))
        return runs

    def chosen_rate(self, method: str) -> float | None:
        """The learning rate at which `method` learned most, whatever it forgot.

        Of equal ones the lower. None until all runs of its grid are finished.

        Raises:
            StudyError: all of them diverged.
        """
        rates = self.study.methods[method].learning_rates
        if len(rates) == 1:
            return rates[0]
        runs = self.grid(method)
        for run in runs:
            if not self.is_over(run):
                return None
        perplexities: dict[float, float] = {}
        # In rising order: of equal perplexities `min` below takes the first.
        for rate, run in sorted(zip(rates, runs, strict=True), key=lambda pair: pair[0]):
            if not run.has_diverged:
                perplexities[rate] = run.perplexity()
        if not perplexities:
            raise StudyError(
                f"methods.{method}: every one of its learning_rates diverged; give lower ones",
                CONFIG_ERROR,
            )
        return min(perplexities, key=perplexities.__getitem__)

    def known_runs(self) -> list[StudyRun]:
        """The runs of every grid, and of the other seeds where the learning rate is chosen."""
        runs: list[StudyRun] = []
        for name in self.study.methods:
            runs += self.grid(name)
            rate = self.chosen_rate(name)
            if rate is not None:
                for seed in self.study.seeds[1:]:
                    runs.append(self.compared(name, rate, seed))
        return runs

    def is_over(self, run: StudyRun) -> bool:
        """Whether nothing is left to do.

        The run is trained and its gate fitted, or it diverged at one of several learning rates.
        """
        if run.is_trained:
            return run.has_its_gate
        is_of_grid = run.config.seed == self.study.seeds[0]
        has_other_rates = len(self.study.methods[run.method].learning_rates) > 1
        return is_of_grid and has_other_rates and run.has_diverged

    def progress(self) -> str:
        """How many of the runs are finished, those that train the base included."""
        total = len(self.stages)
        for compared in self.study.methods.values():
            total += len(compared.learning_rates) + len(self.study.seeds) - 1
        finished = sum(run.is_converted for run in self.stages)
        # The compared runs begin when the base is made.
        if finished == len(self.stages):
            finished += sum(self.is_over(run) for run in self.known_runs())
        return f"{finished} of {total} runs are done"

    def pending_tasks(self, ended: Collection[str] = ()) -> list[Task]:
        """The tasks that can start now, all at the same time; empty where the study is finished.

        `ended` are the names of tasks whose jobs are over. None is submitted twice, however its job
        ended: an error, `scancel`, a lost node.

        Raises:
            StudyError: a method diverged at every learning rate, or one of `ended` is pending.
        """
        tasks = self._pending()
        # Submitted again, such a task would fail again, and a chain of jobs would never end.
        unfinished = [task for task in tasks if task.name in ended]
        if unfinished:
            names = ", ".join(task.name for task in unfinished)
            status = read_status(unfinished[0].run.folder)
            raise StudyError(
                f"{names}: not finished, though the jobs have ended; the first is {status.state}: "
                f"{status.why}; the output of its job says more; submit the study again to continue"
            )
        return tasks

    def _pending(self) -> list[Task]:
        """The tasks of the first part of the study that is not finished: base, corpora, or runs."""
        for run, stage in zip(self.stages, self.study.stages.values(), strict=True):
            if not run.is_converted:
                return [Task(run, _stages_of_base(run), stage.ranks)]
        runs = self.known_runs()
        # All compared runs have the same corpora.
        stages = _stages_of_corpora(runs[0])
        if stages:
            return [Task(runs[0], stages, 1)]
        tasks: list[Task] = []
        for run in runs:
            if not self.is_over(run):
                tasks.append(Task(run, run.training_stages, self.study.ranks))
        return tasks


def _stages_of_base(run: StudyRun) -> tuple[str, ...]:
    """All stages of a run that trains the base."""
    stages = ["tokenize"]
    if any(corpus.sample for corpus in run.config.data.corpora.values()):
        stages.append("sample")
    return (*stages, *run.training_stages, "convert")


def _stages_of_corpora(run: StudyRun) -> tuple[str, ...]:
    """The stages that make what is missing of the run's corpora; none if nothing is."""
    corpora = run.config.data.corpora
    unfinished = [corpora[name] for name in unfinished_corpora(run.config.data)]
    if not unfinished:
        return ()
    if all(corpus.sample for corpus in unfinished):
        # A task of its own: sampling needs a GPU, and tokenizing none.
        return ("sample",)
    if any(corpus.clean for corpus in unfinished):
        return ("clean", "tokenize")
    return ("tokenize",)
