"""The rounds of a search: each is a study of the candidates that are left, with longer runs than the one before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.errors import StudyError
from pipeline.search.candidates import Candidate
from pipeline.search.judgement import Judged, Probe, survivors
from pipeline.study.conduct import conduct
from pipeline.study.description import Compared, RunSettings, Study
from pipeline.study.results import read_outcome
from pipeline.study.runs import StudyRuns, Trial, measured_corpora
from pipeline.training.divergence import REPORT as DIVERGENCE

# What a probe says itself. A budget that ends runs would leave those without figures that are to be judged by it.
_OWN = {"name", "folder", "base", "method", "seed", "upscaled", "forgetting", "profile"}
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Rounds:
    """How probes grow and candidates become fewer."""

    steps: tuple[int, ...] = (25, 50, 100)
    """of a candidate's run, round by round"""
    keep: float = 1 / 3
    """share of the candidates that go on to the next round"""


@dataclass(frozen=True)
class Search:
    """Probes of the run `config`, each in a folder of its own below `folder`; `source` is its file, for errors."""

    config: RunConfig
    source: str
    folder: Path
    budget: float
    rounds: Rounds
    ranks: int = 1
    """processes of a probe"""

    def run(self, candidates: Sequence[Candidate], jobs: int) -> list[Judged]:
        """Does what is not done yet, `jobs` probes side by side; the judged of every round, the last round's first.

        Each candidate is there once, with all of its probes.

        Raises:
            StudyError: a probe ended in another fault than divergence.
        """
        probes: dict[Candidate, tuple[Probe, ...]] = dict.fromkeys(candidates, ())
        left, kept, given_up = list(candidates), list[Judged](), list[Judged]()
        for number, steps in enumerate(self.rounds.steps, 1):
            _logger.info("round %d of %d: %d candidates, %d steps", number, len(self.rounds.steps), len(left), steps)
            measured = self._measure(left, steps, jobs)
            judged = [self._judged(one, (*probes[one], measured[one]) if one in measured else ()) for one in left]
            probes |= {one.candidate: one.probes for one in judged}
            kept = [one for one in judged if one.probes]
            if number < len(self.rounds.steps):
                kept = survivors(kept, self.rounds.keep)
            given_up = [*(one for one in judged if one not in kept), *given_up]
            left = [one.candidate for one in kept]
        return [*kept, *given_up]

    def study(self, candidates: Sequence[Candidate], steps: int) -> Study:
        """A round: every candidate's run, which differ in method and learning rate alone."""
        rates = defaultdict[str, list[float]](list)
        for one in candidates:
            rates[one.shape].append(one.learning_rate)
        return Study(
            name="probe",
            folder=self.folder / f"steps_{steps}",
            base=self.config.base,
            settings=self._settings(steps),
            ranks=self.ranks,
            methods={
                one.shape: Compared(label=one.shape, method=one.method, learning_rates=rates[one.shape])
                for one in candidates
            },
            seeds=[self.config.seed],
        )

    def _measure(self, candidates: Sequence[Candidate], steps: int, jobs: int) -> dict[Candidate, Probe]:
        """The probes of a round; candidates that diverged have none."""
        while sound := [one for one in candidates if not self._diverged(one, steps)]:
            runs = StudyRuns(self.study(sound, steps), self.source)
            try:
                conduct(runs, jobs)
            except StudyError as error:
                if not any(self._diverged(one, steps) for one in sound):
                    raise
                _logger.info("%s; the search goes on without it", error)
                continue
            return {one: read_probe(runs, self._trial(one)) for one in sound if not self._diverged(one, steps)}
        return {}

    def _judged(self, candidate: Candidate, probes: tuple[Probe, ...]) -> Judged:
        return Judged(candidate, probes, self.budget, self.config.schedule.steps)

    def _trial(self, candidate: Candidate) -> Trial:
        return Trial(candidate.shape, candidate.learning_rate, self.config.seed)

    def _diverged(self, candidate: Candidate, steps: int) -> bool:
        return (self.folder / f"steps_{steps}" / str(self._trial(candidate)) / DIVERGENCE).exists()

    def _settings(self, steps: int) -> RunSettings:
        settings = self.config.model_dump(mode="json", exclude_unset=True, exclude=_OWN)
        schedule = {key: value for key, value in settings["schedule"].items() if key != "learning_rate"}
        return {
            **settings,
            "schedule": {**schedule, "steps": steps},
            # Before and after is all that is looked at.
            "validation": {**settings.get("validation", {}), "every_steps": steps},
            "checkpoints": {"every_steps": steps, "keep_last": 1},
            "preflight": {"enabled": False},  # it takes longer than a probe
        }


def read_probe(runs: StudyRuns, trial: Trial) -> Probe:
    """What a finished run showed."""
    outcome = read_outcome(runs.trial(trial))
    new, replay = (outcome.perplexity(role, outcome.after) for role in ("new", "replay"))
    replay_before = outcome.perplexity("replay", outcome.before)
    if new is None or replay is None or replay_before is None:
        raise AssertionError(f"{trial}: both roles are measured, or no search starts")
    replayed = measured_corpora(outcome.run.config, "replay")
    increase = max(outcome.after[one]["perplexity"] / outcome.before[one]["perplexity"] - 1 for one in replayed)
    return Probe(outcome.looks[-1].step, new, replay, replay_before, increase)
