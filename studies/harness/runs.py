"""The runs of a study: each an ordinary run in a folder of its own; which are pending, by what those folders hold.

No other state is kept. It is determined again whenever a run ends, by one process or by a chain of jobs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pipeline.checks.inputs import check_fits
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, load_config, parse_config
from pipeline.config.sources import CHECKPOINTS, RUN_FILE, merged
from pipeline.conversion.convert import HF_FOLDER, VERIFICATION
from pipeline.data.tokenize.corpora import (
    has_heldout,
    is_tokenized,
    named_inputs,
    unfinished_corpora,
)
from pipeline.data.tokenize.units import input_files
from pipeline.errors import CONFIG_ERROR, CheckpointError, ConfigError, StudyError
from pipeline.gating.folder import GATE_FOLDER, open_record
from pipeline.hub import source_of
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
        """Writes the configuration into the run's folder. Raises as `check_same` once there are checkpoints."""
        if (self.folder / CHECKPOINTS).exists():
            self.check_same()
        write_run(self.config)

    def check_same(self) -> None:
        """Raises ConfigError where the folder holds a run with other settings, which would be taken for this one."""
        if not self.path.exists():
            return
        runs = load_config(self.path, base="named"), self.config
        found, wanted = (
            run.model_dump(exclude={"gate"}) for run in runs
        )  # a gate may be added to a finished run
        for values in (found, wanted):  # models of the hub by their names, as in the file
            for section, key in ((values, "base"), (values["vocabulary"] or {}, "folder")):
                if key in section:
                    section[key] = source_of(Path(section[key])) or str(section[key])
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
            settings = open_record(self.folder / GATE_FOLDER).request.get("settings")
        except CheckpointError:
            return False
        return bool(settings == self.config.gate.model_dump(mode="json"))

    @property
    def training_stages(self) -> tuple[str, ...]:
        """The stages of slurm/cpt_korean.sh that train it."""
        upscaling = ("upscale",) if isinstance(self.config.method, ScaleMethod) else ()
        return (*upscaling, "train", *(("gate",) if self.config.gate else ()))

    def perplexity(self) -> float:
        """The geometric mean at the end over the held-out new corpora, infinite where one is.

        Raises:
            RunFolderError: the run's metrics are missing or damaged.
        """
        figures, corpora = (
            read_history(self.folder / METRICS).validations[-1].figures,
            self.config.data.corpora,
        )
        return geometric_mean(
            [figures[name]["perplexity"] for name in figures if corpora[name].role == "new"]
        )


@dataclass(frozen=True)
class Task:
    """Some stages of slurm/cpt_korean.sh for one run; `ranks` is the number of processes on this machine."""

    run: StudyRun
    stages: tuple[str, ...]
    ranks: int

    @property
    def name(self) -> str:
        """The run's name, and the stages where training is not among them."""
        return (
            self.run.name if "train" in self.stages else f"{self.run.name}: {' '.join(self.stages)}"
        )


class StudyRuns:
    """The runs that `study` describes; `source` is its file, for error messages.

    `stages` train the `base` of the compared runs.

    Raises:
        ConfigError: one of the runs has no valid configuration, or nothing to choose learning rates by.
    """

    def __init__(self, study: Study, source: str) -> None:
        self.study = study
        self.source = source
        self.stages: list[StudyRun] = []
        self.base = study.base or study.folder / SCRATCH
        for name, stage in study.stages.items():
            settings = merged({"method": {"name": "fft"}}, stage.settings)
            self.stages.append(self._run(name, settings, f"stages.{name}.settings"))
            self.base = self.stages[-1].folder / HF_FOLDER
        self._first = {name: self.grid(name)[0] for name in study.methods}
        for data in (run.config.data for run in self._first.values()):
            if not any(
                corpus.role == "new" and has_heldout(data, name)
                for name, corpus in data.corpora.items()
            ):
                raise ConfigError(
                    f"{source}: settings.data.corpora: expected a held-out part of a corpus of role new, by which "
                    "learning rates are chosen, found none; set heldout_input or heldout_fraction"
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
        return self._run(
            f"{method}.lr_{learning_rate:g}.seed_{seed}",
            settings,
            f"settings, for {method}",
            method,
        )

    def _run(self, name: str, settings: RunSettings, where: str, method: str = "") -> StudyRun:
        study = self.study
        own = {
            "name": f"{study.name}.{name}",
            "folder": str(study.folder / name),
            "base": str(self.base),
        }
        values = merged(own | {"data": {"folder": str(study.folder / TOKENS)}}, settings)
        return StudyRun(parse_config(values, source=f"{self.source}: {where}"), method)

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

    def grid(self, method: str) -> list[StudyRun]:
        """The runs among which the learning rate of `method` is chosen."""
        return [
            self.compared(method, rate, self.study.seeds[0])
            for rate in self.study.methods[method].learning_rates
        ]

    def chosen_rate(self, method: str) -> float | None:
        """The learning rate at which `method` learned most, whatever it forgot, the lower one of equal ones.

        None until all runs of its grid are finished.

        Raises:
            StudyError: all of them diverged.
        """
        seed = self.study.seeds[0]
        runs = {
            rate: self.compared(method, rate, seed)
            for rate in sorted(self.study.methods[method].learning_rates)
        }
        if len(runs) == 1:
            return next(iter(runs))
        if not all(map(self.is_over, runs.values())):
            return None
        perplexities = {
            rate: run.perplexity() for rate, run in runs.items() if not run.has_diverged
        }
        if not perplexities:
            raise StudyError(
                f"methods.{method}: every one of its learning_rates diverged; give lower ones",
                CONFIG_ERROR,
            )
        return min(perplexities, key=perplexities.__getitem__)

    def known_runs(self) -> list[StudyRun]:
        """The runs of every grid of learning rates, and those of the other seeds where the rate is chosen."""
        runs = []
        for name in self.study.methods:
            runs += self.grid(name)
            if (rate := self.chosen_rate(name)) is not None:
                runs += [self.compared(name, rate, seed) for seed in self.study.seeds[1:]]
        return runs

    def is_over(self, run: StudyRun) -> bool:
        """Whether nothing is left to do: trained and its gate fitted, or diverged at one of several learning rates."""
        if run.is_trained:
            return run.has_its_gate
        is_of_grid = run.config.seed == self.study.seeds[0]
        return (
            is_of_grid
            and len(self.study.methods[run.method].learning_rates) > 1
            and run.has_diverged
        )

    def progress(self) -> str:
        """How many of the runs are finished, those that train the base included."""
        methods = self.study.methods.values()
        total = len(self.stages) + sum(
            len(own.learning_rates) + len(self.study.seeds) - 1 for own in methods
        )
        stages = sum(run.is_converted for run in self.stages)
        finished = stages + (
            sum(map(self.is_over, self.known_runs())) if stages == len(self.stages) else 0
        )
        return f"{finished} of {total} runs are done"

    def pending_tasks(self, ended: Collection[str] = ()) -> list[Task]:
        """The tasks that can start now, all at the same time; empty where the study is finished.

        `ended` are the names of tasks whose jobs are over. None is submitted twice, however its job ended: an error,
        `scancel`, a lost node.

        Raises:
            StudyError: a method diverged at every learning rate, or some of `ended` are still pending.
        """
        tasks = self._pending()
        if unfinished := [task for task in tasks if task.name in ended]:
            status, names = (
                read_status(unfinished[0].run.folder),
                ", ".join(task.name for task in unfinished),
            )
            raise StudyError(
                f"{names}: not finished, though the jobs have ended; the first is "
                f"{status.state}: {status.why}; the output of its job says more; submit the study again to continue"
            )
        return tasks

    def _pending(self) -> list[Task]:
        for run, stage in zip(self.stages, self.study.stages.values(), strict=True):
            if not run.is_converted:
                sampling = (
                    ("sample",)
                    if any(corpus.sample for corpus in run.config.data.corpora.values())
                    else ()
                )
                return [
                    Task(run, ("tokenize", *sampling, *run.training_stages, "convert"), stage.ranks)
                ]
        runs = self.known_runs()
        first = runs[0]
        # The compared runs share their base and their corpora. Sampling is a task of its own: tokenizing needs no GPU.
        corpora = first.config.data.corpora
        if unfinished := [corpora[name] for name in unfinished_corpora(first.config.data)]:
            if all(corpus.sample for corpus in unfinished):
                return [Task(first, ("sample",), 1)]
            return [
                Task(
                    first,
                    (
                        *(["clean"] if any(corpus.clean for corpus in unfinished) else []),
                        "tokenize",
                    ),
                    1,
                )
            ]
        return [
            Task(run, run.training_stages, self.study.ranks)
            for run in runs
            if not self.is_over(run)
        ]
