"""The pending tasks of a study, and the learning rate of each method, from the contents of its run folders.

No other state is kept. Both are determined again whenever a run ends, by one process or by a chain of jobs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import HF_FOLDER, VERIFICATION
from pipeline.data.corpora import made_by, unfinished_corpora
from pipeline.data.token_corpus import SAMPLER, TOKENIZER
from pipeline.errors import CONFIG_ERROR, USER_ERROR, CheckpointError, StudyError
from pipeline.run_folder.status import read_status
from pipeline.scale.gate_folder import GATE_FOLDER, open_record
from pipeline.studies.results import Outcome, has_diverged, is_trained, read_outcome
from pipeline.studies.study_runs import StudyRun, StudyRuns, Trial


@dataclass(frozen=True)
class Task:
    """Some stages of slurm/cpt_korean.sh for one run; `ranks` is the number of processes on this machine."""

    run: StudyRun
    stages: tuple[str, ...]
    ranks: int

    @property
    def name(self) -> str:
        """The run's name, and the stages where training is not among them."""
        folder = self.run.config.folder.name
        return folder if "train" in self.stages else f"{folder}: {' '.join(self.stages)}"


def pending_tasks(runs: StudyRuns) -> list[Task]:
    """The tasks that can start now, all at the same time; empty where the study is finished.

    Raises:
        StudyError: a method diverged at every learning rate.
    """
    study = runs.study
    for run, stage in zip(runs.stages, study.stages.values(), strict=True):
        if not _is_converted(run):
            sampling = ("sample",) if any(corpus.sample for corpus in run.config.data.corpora.values()) else ()
            return [Task(run, ("tokenize", *sampling, *_training_stages(run), "convert"), stage.ranks)]
    trials = {trial: runs.trial(trial) for trial in known_trials(runs)}
    first = next(iter(trials.values()))
    # The compared runs share their base and their corpora. Sampling is a task of its own: tokenizing needs no GPU.
    corpora = first.config.data.corpora
    unfinished = {made_by(corpora[name]) for name in unfinished_corpora(first.config.data)}
    for tool, making in ((TOKENIZER, "tokenize"), (SAMPLER, "sample")):
        if tool in unfinished:
            return [Task(first, (making,), 1)]
    return [Task(run, _training_stages(run), study.ranks) for trial, run in trials.items() if not _is_over(runs, trial)]


def pending_after(runs: StudyRuns, ended: Collection[str]) -> list[Task]:
    """The tasks that can start now that the jobs of the tasks with the names `ended` are over.

    A task is not submitted twice, however its job ended: an error, `scancel`, a lost node. A run that diverged at one
    of several learning rates is finished.

    Raises:
        StudyError: some of `ended` are still pending.
        RunFolderError: the folder of one of them was removed.
    """
    tasks = pending_tasks(runs)
    unfinished = [task for task in tasks if task.name in ended]
    if not unfinished:
        return tasks
    first, *others = unfinished
    status = read_status(first.run.config.folder)
    also = f" (nor are {', '.join(task.name for task in others)})" if others else ""
    raise StudyError(
        f"{first.name}: its job has ended, but the run is not finished{also}; the run is {status.state}: {status.why}; "
        "the output of its job says more; submit the study again to continue with what is left",
        USER_ERROR,
    )


def run_count(runs: StudyRuns) -> int:
    """How many runs the study has in all, those that train the base included."""
    methods = runs.study.methods.values()
    return len(runs.stages) + sum(len(own.learning_rates) + len(runs.study.seeds) - 1 for own in methods)


def finished_count(runs: StudyRuns) -> int:
    """How many of them are finished."""
    stages = sum(_is_converted(run) for run in runs.stages)
    if stages < len(runs.stages):
        return stages
    return stages + sum(_is_over(runs, trial) for trial in known_trials(runs))


def known_trials(runs: StudyRuns) -> list[Trial]:
    """The runs of every grid of learning rates, and those of the other seeds where the rate is chosen."""
    trials = []
    for name in runs.study.methods:
        trials += _grid(runs, name)
        if (rate := chosen_rate(runs, name)) is not None:
            trials += [Trial(name, rate, seed) for seed in runs.study.seeds[1:]]
    return trials


def chosen_rate(runs: StudyRuns, method: str) -> float | None:
    """The learning rate at which `method` is compared; None until all runs of its grid are finished.

    Raises:
        StudyError: all of them diverged.
    """
    trials = _grid(runs, method)
    if len(trials) == 1:
        return trials[0].learning_rate
    return best_rate(outcomes(runs, method)) if all(_is_over(runs, trial) for trial in trials) else None


def outcomes(runs: StudyRuns, method: str) -> dict[Trial, Outcome | None]:
    """The outcomes of the finished runs of a method's grid; None for those that diverged."""
    grid = {trial: runs.trial(trial) for trial in _grid(runs, method)}
    return {trial: None if has_diverged(run) else read_outcome(run) for trial, run in grid.items()}


def best_rate(outcomes: Mapping[Trial, Outcome | None]) -> float:
    """The learning rate of the run, of those of a method's grid, that learned most, whatever it forgot.

    Raises:
        StudyError: all of them diverged.
    """
    perplexities = {
        trial.learning_rate: outcome.perplexity("new", outcome.after)
        for trial, outcome in outcomes.items()
        if outcome is not None
    }
    if not perplexities:
        (method,) = {trial.method for trial in outcomes}
        raise StudyError(f"methods.{method}: every one of its learning_rates diverged; give lower ones", CONFIG_ERROR)
    return best_learning_rate({rate: math.inf if value is None else value for rate, value in perplexities.items()})


def best_learning_rate(perplexities: Mapping[float, float]) -> float:
    """The rate with the lowest perplexity, the lower rate of equal ones; what is not finite counts as infinite."""
    finite = {rate: value if math.isfinite(value) else math.inf for rate, value in perplexities.items()}
    return min(sorted(finite), key=finite.__getitem__)


def is_at_the_edge(rate: float, grid: Sequence[float]) -> bool:
    """Whether a better rate may lie outside of the grid."""
    return len(grid) > 1 and rate in (min(grid), max(grid))


def _grid(runs: StudyRuns, method: str) -> list[Trial]:
    """The runs among which the learning rate of `method` is chosen."""
    return [Trial(method, rate, runs.study.seeds[0]) for rate in runs.study.methods[method].learning_rates]


def _training_stages(run: StudyRun) -> tuple[str, ...]:
    upscaling = ("upscale",) if isinstance(run.config.method, ScaleMethod) else ()
    return (*upscaling, "train", *(("gate",) if run.config.gate else ()))


def _is_over(runs: StudyRuns, trial: Trial) -> bool:
    """Whether nothing is left to do: trained and its gate fitted, or diverged at one of several learning rates."""
    run = runs.trial(trial)
    if is_trained(run):
        return run.config.gate is None or _is_gate_fitted(run.config)
    is_one_of_several = trial.seed == runs.study.seeds[0] and len(_grid(runs, trial.method)) > 1
    return is_one_of_several and has_diverged(run)


def _is_gate_fitted(config: RunConfig) -> bool:
    """Whether the run has a whole gate of these settings: others may be given to a finished run."""
    try:
        request = open_record(config.folder / GATE_FOLDER).request
    except CheckpointError:
        return False
    return config.gate is not None and request.get("settings") == config.gate.model_dump(mode="json")


def _is_converted(run: StudyRun) -> bool:
    return is_trained(run) and (run.config.folder / HF_FOLDER / VERIFICATION).exists()
