"""Which learning rate a method is compared at: chosen by what was learned alone, whatever was forgotten."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.method import ScaleMethod
from pipeline.conversion.convert import HF_FOLDER, VERIFICATION
from pipeline.data.corpora import is_tokenized
from pipeline.errors import CONFIG_ERROR, USER_ERROR, StudyError
from pipeline.experiments.results import Outcome, has_diverged, is_trained, read_outcome
from pipeline.experiments.study_runs import StudyRun, StudyRuns, Trial
from pipeline.run_folder.status import read_status


def best_learning_rate(perplexities: Mapping[float, float]) -> float:
    """The rate with the lowest perplexity; of equal ones the smaller. A run without a finite one is the worst."""
    finite = {rate: value if math.isfinite(value) else math.inf for rate, value in perplexities.items()}
    return min(sorted(finite), key=finite.__getitem__)


def is_at_the_edge(rate: float, grid: Sequence[float]) -> bool:
    """Whether a better one may lie outside of the grid, if that has an outside."""
    return len(grid) > 1 and rate in (min(grid), max(grid))


# --- What is left to do of a study: asked again whenever something ended, by one process here or by jobs on a cluster


@dataclass(frozen=True)
class Task:
    """Some stages of slurm/cpt_korean.sh for one run, on so many ranks where this machine is all there is."""

    run: StudyRun
    stages: tuple[str, ...]
    ranks: int

    @property
    def name(self) -> str:
        """Of the run, and of the stage where that is not training."""
        own = self.run.config.folder.name
        return own if "train" in self.stages else f"{own}: {' '.join(self.stages)}"


def due(runs: StudyRuns) -> list[Task]:
    """What can be done now, side by side; nothing where the study is done."""
    study = runs.study
    for run, stage in zip(runs.stages, study.stages.values(), strict=True):
        if not _is_converted(run):
            return [Task(run, ("tokenize", *_training(run), "convert"), stage.ranks)]
    trials = {trial: runs.trial(trial) for trial in trials_so_far(runs)}
    first = next(iter(trials.values()))
    if not is_tokenized(first.config.data):
        return [Task(first, ("tokenize",), 1)]
    return [Task(run, _training(run), study.ranks) for trial, run in trials.items() if not _is_over(runs, trial)]


def trials_so_far(runs: StudyRuns) -> list[Trial]:
    """The runs that are known to belong to the study: those of the grids, and where one is done, the chosen ones."""
    trials = []
    for name in runs.study.methods:
        trials += grid(runs, name)
        if (rate := chosen_rate(runs, name)) is not None:
            trials += [Trial(name, rate, seed) for seed in runs.study.seeds[1:]]
    return trials


def grid(runs: StudyRuns, method: str) -> list[Trial]:
    """The runs among which the learning rate of `method` is chosen."""
    return [Trial(method, rate, runs.study.seeds[0]) for rate in runs.study.methods[method].learning_rates]


def chosen_rate(runs: StudyRuns, method: str) -> float | None:
    """The learning rate at which `method` is compared; None while runs that decide it are not done.

    Raises:
        StudyError: none of its runs came to an end.
    """
    trials = grid(runs, method)
    if len(trials) == 1:
        return trials[0].learning_rate
    if not all(_is_over(runs, trial) for trial in trials):
        return None
    return best_rate(outcomes(runs, method))


def outcomes(runs: StudyRuns, method: str) -> dict[Trial, Outcome | None]:
    """What became of the finished runs of a method's grid; None of those that diverged."""
    found = {trial: runs.trial(trial) for trial in grid(runs, method)}
    return {trial: None if has_diverged(run) else read_outcome(run) for trial, run in found.items()}


def best_rate(outcomes: Mapping[Trial, Outcome | None]) -> float:
    """The learning rate of the run, of those of a method's grid, that learned most.

    Raises:
        StudyError: all of them diverged.
    """
    left = {
        trial.learning_rate: outcome.perplexity("new", outcome.after)
        for trial, outcome in outcomes.items()
        if outcome is not None
    }
    if not left:
        (method,) = {trial.method for trial in outcomes}
        raise StudyError(f"methods.{method}: every one of its learning_rates diverged; give lower ones", CONFIG_ERROR)
    return best_learning_rate({rate: math.inf if value is None else value for rate, value in left.items()})


def run_count(runs: StudyRuns) -> int:
    """How many runs the study has in all, those that make the base included."""
    study = runs.study
    return len(runs.stages) + sum(len(one.learning_rates) + len(study.seeds) - 1 for one in study.methods.values())


def finished_count(runs: StudyRuns) -> int:
    """How many of them are done."""
    stages = sum(_is_converted(run) for run in runs.stages)
    if stages < len(runs.stages):
        return stages
    return stages + sum(_is_over(runs, trial) for trial in trials_so_far(runs))


def _training(run: StudyRun) -> tuple[str, ...]:
    return ("upscale", "train") if isinstance(run.config.method, ScaleMethod) else ("train",)


def _is_over(runs: StudyRuns, trial: Trial) -> bool:
    """Whether nothing is left to do: of several rates, one that diverges is the worst, and has said all it can."""
    run = runs.trial(trial)
    others = len(runs.study.methods[trial.method].learning_rates) > 1 and trial.seed == runs.study.seeds[0]
    return is_trained(run) or (others and has_diverged(run))


def _is_converted(run: StudyRun) -> bool:
    return is_trained(run) and (run.config.folder / HF_FOLDER / VERIFICATION).exists()


# --- A study as a chain of jobs: whether it goes on, once the jobs of some tasks have ended -------------------------


def due_after(runs: StudyRuns, ended: Collection[str]) -> list[Task]:
    """What can be done now that the jobs of the tasks with the names `ended` are over.

    None is submitted a second time, whatever ended its job: a fault, `scancel`, a lost node. A run that diverged at one
    of several learning rates is not due.

    Raises:
        StudyError: some of `ended` are due still.
        RunFolderError: somebody removed the folder of one.
    """
    tasks = due(runs)
    left = [task for task in tasks if task.name in ended]
    if not left:
        return tasks
    first, *others = left
    status = read_status(first.run.config.folder)
    also = f" (nor are {', '.join(task.name for task in others)})" if others else ""
    raise StudyError(
        f"{first.name}: its job is over, and it is not done{also}; the run is {status.state}: {status.why}; "
        "the output of its job says more; submitted again, the study goes on with what is left",
        USER_ERROR,
    )
