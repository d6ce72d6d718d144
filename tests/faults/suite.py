"""Every fault by its short name: how it is injected, and its expected outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import injections
from tests.faults.injections import Injection
from tests.faults.random_kills import kill_at_random, kill_jobs_at_random
from tests.faults.runs import LASTING, Laboratory
from tests.faults.table import Result
from tests.faults.trial import fill_the_disk, poison_a_batch, stop_and_resume, survive
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import NODES


@dataclass(frozen=True)
class Fault:
    """Its title in the table, and the function that injects it."""

    title: str
    trial: Callable[..., Result]

    def inject_into_run(self, laboratory: Laboratory, cluster: Cluster) -> Result:
        """Injects it into a run.

        Raises:
            TrialError: it did not happen, or the run did not recover.
        """
        return self.trial(self.title, laboratory, cluster)


def _stop(title: str, inject: Injection, **expected: Any) -> Fault:
    return Fault(title, partial(stop_and_resume, inject=inject, **expected))


def _damage(what: str, strike: Callable[[Path], None]) -> Fault:
    title, while_down = f"the newest checkpoint {what}", injections.done_to_the_newest(strike)
    return _stop(title, injections.requeue, while_down=while_down, checkpoints_before=2)


FAULTS = {
    "requeue": _stop(
        "scontrol requeue",
        injections.requeue,
        loses_steps=None,
        remarks="Slurm sends TERM, and KILL after KillWait",
    ),
    "time-limit": _stop(
        "the time limit (--signal=B:USR1@60)",
        injections.come_near_the_time_limit,
        shape=LASTING,
        options=injections.ANNOUNCED_LIMIT,
        while_down=injections.lift_the_time_limit,
        loses_steps=False,
        remarks="Slurm looks at limits every 30 s",
    ),
    "term": _stop("scancel --signal=TERM", injections.terminate, loses_steps=False),
    "kill-rank": _stop("kill -9 of a rank", injections.kill_rank),
    "kill-launcher": _stop("kill -9 of srun", injections.kill_launcher),
    "kill-script": _stop("kill -9 of the batch script", injections.kill_batch_script, loses_steps=None),
    "daemon": Fault(
        "slurmd killed and brought back, on each node",
        partial(survive, injections=[partial(injections.restart_daemon, node=node) for node in NODES]),
    ),
    "node": _stop("a node lost with all it runs, and back", injections.lose_node),
    "hung": _stop(
        "a rank that hangs (SIGSTOP)",
        injections.stop_rank,
        changes={"watchdog": {"beat_every_s": 1, "dead_after_s": 8}},
        environment={"EXIT_GRACE_S": "5"},
        remarks="watchdog.dead_after_s 8, EXIT_GRACE_S 5",
    ),
    "checkpoint-truncated": _damage("truncated", injections.truncate),
    "checkpoint-flipped": _damage("with a bit flipped", injections.flip_bit),
    "checkpoint-missing": _damage("without a rank's file", injections.lose_file),
    "disk-full": Fault("the disk full during a save, and free again", fill_the_disk),
    "nan-once": Fault("a NaN in a batch, once", partial(poison_a_batch, stays=False)),
    "nan-stays": Fault("a NaN in a batch, whenever it is read", partial(poison_a_batch, stays=True)),
    "random": Fault(
        "kill -9 of plain ranks at random instants, saving included", partial(kill_at_random, kills=25, seed=1)
    ),
    "random-asynchronous": Fault(
        "kill -9 of plain ranks at random instants, saving asynchronously",
        partial(kill_at_random, kills=20, seed=2, asynchronous=True),
    ),
    "random-slurm": Fault(
        "kill -9 of a rank or srun at random instants, through Slurm", partial(kill_jobs_at_random, kills=5, seed=3)
    ),
}
"""By the short names that `--only` takes."""
