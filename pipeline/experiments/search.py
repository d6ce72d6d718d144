"""Searches SCALE's settings for the best trade-offs between learning and forgetting, with Optuna.

A trial is an ordinary run on the base and texts of a study: variant, widths, l_fp, collaborative modules and learning
rate are sampled within a parameter budget, and the run is scored by two objectives, nats learned and nats forgotten.
No trial is stopped early: Optuna prunes single objectives only, and early forgetting does not predict that at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from pipeline.config.method import ScaleMethod
from pipeline.errors import ConfigError, MissingPackageError, StudyError
from pipeline.evaluation.table import cell, table
from pipeline.experiments.report.runs import PERPLEXITY, Run, Standing, not_dominated
from pipeline.experiments.results import Row, has_diverged, read_outcome
from pipeline.experiments.run_study import run_study
from pipeline.experiments.study import TOKENS, Compared
from pipeline.experiments.study_runs import StudyRuns, Trial
from pipeline.sizing.matching import Matcher, Variant

try:
    import optuna
except ImportError:
    raise MissingPackageError("optuna: not installed, the search needs it; pip install 'scale-cpt[search]'") from None

HEARTBEAT_S = 30
"""A trial without a heartbeat for twice as long belongs to a process that ended; it is run again, and resumes."""
_ROW = "row"  # of a trial that ended: its row, as in a study's summary, or nothing where the run diverged


class Search:
    """Trials on the base of the study `runs`, in `folder`. Processes that are given the same folder share the trials.

    Learning rates range from a tenth of the lowest to the highest of the study's SCALE methods. `max_parameters` bounds
    what trains; by default the largest of these methods does. Added widths are multiples of `multiple_of`.

    Raises:
        ConfigError: the study compares no SCALE method, its base is not trained yet, or no expansion is within
            `max_parameters`.
    """

    def __init__(
        self, runs: StudyRuns, folder: Path, *, max_parameters: int | None = None, multiple_of: int = 8
    ) -> None:
        if not runs.base.exists():
            raise ConfigError(f"{runs.base}: no such folder; train the study's base first, with tools/run_study.py")
        methods = {name: method for name, method in runs.methods.items() if isinstance(method, ScaleMethod)}
        if not methods:
            raise ConfigError(f"{runs.source}: methods: expected at least one of SCALE to vary, found none")
        rates = [rate for name in methods for rate in runs.study.methods[name].learning_rates]
        self._runs, self._folder = runs, folder
        self._template = next(iter(methods.values()))
        self._matcher = Matcher(runs.matcher.config, runs.matcher.spec, multiple_of=multiple_of)
        self._rates = (min(rates) / 10, max(rates))
        self.max_parameters = max_parameters or max(map(self._matcher.trained, methods.values()))
        smallest = self._matcher.trained(self._matcher.family("preserve").of_size(multiple_of))
        if smallest > self.max_parameters:
            raise ConfigError(f"--max-parameters: {self.max_parameters}; the smallest expansion trains {smallest}")
        folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # heartbeats, since 2021
        self._trials = optuna.create_study(
            storage=optuna.storages.RDBStorage(
                f"sqlite:///{folder}/trials.db",
                heartbeat_interval=HEARTBEAT_S,
                heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(),
            ),
            sampler=optuna.samplers.TPESampler(n_startup_trials=5),  # of tens; Optuna's default of 10 is for more
            study_name="expansion",
            directions=["maximize", "minimize"],
            load_if_exists=True,
        )

    def run(self, count: int) -> None:
        """Runs trials until `count` have ended, those of earlier calls and of other processes included."""
        while len(self._ended()) < count:
            self._trials.optimize(self._run_trial, n_trials=1)

    @property
    def rows(self) -> list[Row]:
        """The rows of the trials that did not diverge."""
        return [Row.model_validate(row) for trial in self._ended() if (row := trial.user_attrs[_ROW])]

    def _ended(self) -> list[optuna.trial.FrozenTrial]:
        return [trial for trial in self._trials.get_trials(deepcopy=False) if _ROW in trial.user_attrs]

    def _run_trial(self, trial: optuna.Trial) -> Standing:
        method = self._sampled(trial)
        rate = float(f"{trial.suggest_float('learning_rate', *self._rates, log=True):.3g}")
        modules = "" if method.l_fp is None else f"-lfp{method.l_fp}-{method.collaborative_modules}"
        key = Trial(f"{method.variant}-h{method.expansion.hidden_size}{modules}", rate, self._runs.study.seeds[0])
        runs = self._study_of(key, method)
        run = runs.trial(key)
        try:
            run_study(runs, jobs=1)
        except KeyboardInterrupt:
            raise SystemExit(130) from None  # Optuna would mark the trial as failed; without a heartbeat it is resumed
        except StudyError:
            if not has_diverged(run):
                raise
        row = None if has_diverged(run) else read_outcome(run).row(key, f"{key.method} at {rate:g}", self._folder)
        place = PERPLEXITY.standing(row, row.after) if row else None
        trial.set_user_attr(_ROW, row.model_dump(mode="json") if row and place else None)
        if place is None:
            raise optuna.TrialPruned
        return place

    def _sampled(self, trial: optuna.Trial) -> ScaleMethod:
        """A method within the budget; raises TrialPruned where the sampled one is larger."""
        step, base = self._matcher.multiple_of, self._matcher.spec.widths.hidden_size
        variant = cast("Variant", trial.suggest_categorical("variant", get_args(Variant)))
        added = trial.suggest_int("hidden_size", step, max(step, base // 2 // step * step), step=step)
        # Heads and FFN grow by the same share; norm, initialisers and threshold are the study's.
        changes = {**self._matcher.family(variant).of_size(added).model_dump(), "l_fp": None}
        changes |= self._template.model_dump(include={"norm", "initialisers", "router_threshold"})
        if variant != "preserve":
            changes["l_fp"] = trial.suggest_int("l_fp", 0, self._matcher.spec.num_layers - 1)
            changes["collaborative_modules"] = trial.suggest_categorical("modules", ["attention", "ffn", "both"])
        method = ScaleMethod.model_validate(changes)
        if self._matcher.trained(method) > self.max_parameters:
            raise optuna.TrialPruned
        return method

    def _study_of(self, key: Trial, method: ScaleMethod) -> StudyRuns:
        """A study of one run, on the base and texts of the one that is searched."""
        study = self._runs.study
        own = Compared(label=key.method, method=method, learning_rates=[key.learning_rate])
        settings = {**study.settings, "data": {"folder": str(study.folder / TOKENS), **study.settings["data"]}}
        run = {"folder": self._folder, "settings": settings, "methods": {key.method: own}, "seeds": [key.seed]}
        base: dict[str, Any] = {"base": self._runs.base, "scratch": None, "stages": {}, "match": None}
        return StudyRuns(study.model_copy(update={**run, **base}), self._runs.source)


def front(rows: Sequence[Row]) -> list[tuple[Row, Standing]]:
    """The Pareto front of learning against forgetting, sorted by what was learned."""
    placed = [(row, place) for row in rows if (place := PERPLEXITY.standing(row, row.after))]
    return sorted(not_dominated(placed), key=lambda pair: pair[1].learned)


def comparison(rows: Sequence[Row], by_hand: Sequence[Run]) -> str:
    """A table of the search's front and the study's, which marks the runs on the front of both together."""
    tried = [row for run in by_hand for row in run.tried or [run.row]]
    best = [row for row, _ in front([*rows, *tried])]
    lines = []
    for source, own in (("search", rows), ("study", tried)):
        for row, place in front(own):
            costs = [cell(row.trainable_parameters, ","), cell(row.learning_rate, "g")]
            changes = [PERPLEXITY.on_new(place.learned), PERPLEXITY.on_kept(place.forgotten)]
            lines.append([row.label, source, *costs, *changes, "on the front of both" if row in best else ""])
    return table(["", "found by", "trained", "learning rate", "new", "replay", ""], lines)
