"""kill -9 at random times of a run: starting, training, saving."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from tests.faults import injections
from tests.faults.job import Job
from tests.faults.local import LocalRanks
from tests.faults.runs import BRIEF, RANKS, Laboratory, Run, TrialError
from tests.faults.table import Result
from tests.faults.trial import interrupt
from tests.slurm.cluster import Cluster
from tests.waiting import PATIENCE_S

SAVE_EVERY = 2
IN_A_SAVE_FRACTION = 1 / 3
"""This fraction of the kills waits for the next save: saves are short, and random times rarely hit them."""
EXIT_GRACE_S = 3.0
"""A rank whose peers die before the rendezvous waits for half an hour unless its launcher ends it."""
_VICTIMS = ((0,), (1,), tuple(range(RANKS)))


@dataclass
class Tally:
    """The cost of the kills so far, and what the run was doing at each."""

    moments: Counter[str] = field(default_factory=Counter)
    steps_lost: int = 0
    seconds_to_resume: float = 0.0

    @property
    def kills(self) -> int:
        return self.moments.total()

    def add(self, moment: str, steps_lost: int) -> None:
        """Counts a kill."""
        self.moments[moment] += 1
        self.steps_lost = max(self.steps_lost, steps_lost)

    def resumed(self, seconds: float) -> None:
        """Counts the time until a killed run trained again."""
        self.seconds_to_resume = max(self.seconds_to_resume, seconds)

    def result(self, fault: str, equal: bool, how: str) -> Result:
        """The row of the table."""
        moments = ", ".join(f"{count} while {moment}" for moment, count in sorted(self.moments.items()))
        return Result(fault, self.kills, self.steps_lost, self.seconds_to_resume, equal, f"{how}; {moments}")


def kill_at_random(
    fault: str,
    laboratory: Laboratory,
    _: Cluster | None = None,
    *,
    kills: int,
    seed: int,
    asynchronous: bool = False,
) -> Result:
    """Trains runs as plain processes, and kills one or both ranks, until there were `kills` kills."""
    draw = random.Random(seed)
    whole_s = laboratory.seconds_of(BRIEF)
    tally, equal, runs = Tally(), True, 0
    while tally.kills < kills:
        runs += 1
        run = laboratory.new_run(BRIEF, checkpoints={"every_steps": SAVE_EVERY, "asynchronous": asynchronous})
        struck_at: float | None = None
        while True:
            lives_s = draw.uniform(0, whole_s) if tally.kills < kills else PATIENCE_S
            attempt = Attempt(run, lives_s, draw.choice(_VICTIMS), in_a_save=draw.random() < IN_A_SAVE_FRACTION)
            if struck_at is not None and attempt.first_step_at is not None:
                tally.resumed(attempt.first_step_at - struck_at)
            struck_at = attempt.struck_at
            if struck_at is None:
                break
            tally.add(attempt.moment, run.step - run.saved_step)
        equal = equal and laboratory.is_undisturbed(run)
    return tally.result(fault, equal, f"{runs} runs as plain processes that save every {SAVE_EVERY} steps, seed {seed}")


class Attempt:
    """Starts a run and kills it after `lives_s` seconds, or in the first save after that.

    Attributes:
        first_step_at: the time of its first new step, if there was one.
        struck_at: when it was killed; None if it finished before.

    Raises:
        TrialError: it failed without a kill, or resumed from another checkpoint than the newest.
    """

    def __init__(self, run: Run, lives_s: float, victims: tuple[int, ...], *, in_a_save: bool) -> None:
        self.run = run
        self.first_step_at: float | None = None
        self.struck_at: float | None = None
        self._left_over = run.unfinished_saves
        printed, saved, resumptions = len(run.output), run.saved_step, len(run.resumed_steps)
        with LocalRanks(run.config, RANKS, run.log) as ranks:
            self._watch(ranks, printed, time.monotonic() + lives_s)
            while in_a_save and not self._is_saving and not ranks.wait(0):
                time.sleep(0.001)
            if ranks.wait(0) or not self._strike(ranks, victims):
                ranks.wait(PATIENCE_S)
                if ranks.exit_codes != [0] * RANKS:
                    raise TrialError(f"{run.folder}: it ended with {ranks.exit_codes}\n{run.output}")
        for resumed in run.resumed_steps[resumptions:]:  # none if it was killed before it resumed
            if resumed != saved:
                raise TrialError(f"{run.folder}: it resumed from step {resumed}, but {saved} was saved\n{run.output}")

    @property
    def moment(self) -> str:
        """What the run was doing when it was killed."""
        if self._is_saving:
            return "saving"
        return "starting" if self.first_step_at is None else "training"

    @property
    def _is_saving(self) -> bool:
        return bool(self.run.unfinished_saves - self._left_over)

    def _watch(self, ranks: LocalRanks, printed: int, deadline: float) -> None:
        while time.monotonic() < deadline and not ranks.wait(0):
            if self.first_step_at is None and self.run.trains_again(printed):
                self.first_step_at = time.monotonic()
            time.sleep(0.02)

    def _strike(self, ranks: LocalRanks, victims: tuple[int, ...]) -> bool:
        """Kills the victims and waits for the others; returns False if all victims had already ended."""
        struck_at = time.monotonic()
        if not ranks.kill(victims):
            return False
        self.struck_at = struck_at
        if self.first_step_at is None:
            ranks.wait(EXIT_GRACE_S)
        elif not ranks.wait(PATIENCE_S):
            raise TrialError(f"{self.run.folder}: a rank outlived the other by {PATIENCE_S:.0f} s\n{self.run.output}")
        return True


def kill_jobs_at_random(fault: str, laboratory: Laboratory, cluster: Cluster, *, kills: int, seed: int) -> Result:
    """The same for Slurm jobs, including srun; the first job is not disturbed, to measure how long one takes."""
    laboratory.undisturbed(BRIEF)
    draw = random.Random(seed)
    tally, equal, jobs, whole_s = Tally(), True, 0, 0.0
    while tally.kills < kills or jobs == 0:
        jobs += 1
        run, began = laboratory.new_run(BRIEF), time.monotonic()
        job = Job(cluster, run, MAX_RESTARTS_WITHOUT_PROGRESS=str(kills))
        while whole_s and tally.kills < kills:
            if job.ends_within(draw.uniform(0, whole_s)) or run.is_done:
                break
            cost = interrupt(job, partial(injections.kill_any, draw=draw))
            tally.add("at work", cost.steps_lost)
            tally.resumed(cost.seconds_to_resume)
        job.finish()
        whole_s = whole_s or time.monotonic() - began
        equal = equal and laboratory.is_undisturbed(run)
    return tally.result(fault, equal, f"{jobs} jobs, seed {seed}")
