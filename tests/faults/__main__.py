"""The fault suite: injects every known fault into real runs on a real two-node Slurm, and compares the results.

python -m tests.faults                       all; prints the table and writes runs/faults/summary.json
python -m tests.faults --only requeue hung   some
"""

# ruff: noqa: T201  (a command line)
from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.files import write_json
from tests.faults import trials
from tests.faults.random_kills import kill_at_random, kill_jobs_at_random
from tests.faults.runs import LASTING, Laboratory
from tests.faults.trials import Result, fill_the_disk, poison_a_batch, restart_daemon, stop_and_resume, survive
from tests.slurm.cluster import NODES, guarded_cluster, why_not


def _damage(damage: Callable[[Path], None]) -> Callable[..., Result]:
    while_down = partial(trials.to_the_newest, damage)
    return partial(stop_and_resume, inject=trials.requeue, while_down=while_down, checkpoints_before=2)


FAULTS: dict[str, tuple[str, Callable[..., Result]]] = {
    "requeue": (
        "scontrol requeue",
        partial(
            stop_and_resume,
            inject=trials.requeue,
            loses_steps=None,
            remarks="Slurm sends TERM, and KILL after KillWait",
        ),
    ),
    "time-limit": (
        "the time limit (--signal=B:USR1@60)",
        partial(
            stop_and_resume,
            inject=trials.come_near_the_time_limit,
            shape=LASTING,
            options=("--time=10", "--signal=B:USR1@60"),
            while_down=trials.lift_the_time_limit,
            loses_steps=False,
            remarks="Slurm looks at limits every 30 s",
        ),
    ),
    "term": ("scancel --signal=TERM", partial(stop_and_resume, inject=trials.terminate, loses_steps=False)),
    "kill-rank": ("kill -9 of a rank", partial(stop_and_resume, inject=trials.kill_rank)),
    "kill-launcher": ("kill -9 of srun", partial(stop_and_resume, inject=trials.kill_launcher)),
    "kill-script": (
        "kill -9 of the batch script",
        partial(stop_and_resume, inject=trials.kill_batch_script, loses_steps=None),
    ),
    "daemon": (
        "slurmd killed and brought back, on each node",
        partial(survive, injections=[partial(restart_daemon, node) for node in NODES]),
    ),
    "node": ("a node lost with all it runs, and back", partial(stop_and_resume, inject=trials.lose_node)),
    "hung": (
        "a rank that hangs (SIGSTOP)",
        partial(
            stop_and_resume,
            inject=lambda job: job.stop_between_checkpoints(),
            changes={"watchdog": {"beat_every_s": 1, "dead_after_s": 8}},
            environment={"EXIT_GRACE_S": "5"},
            remarks="watchdog.dead_after_s 8, EXIT_GRACE_S 5",
        ),
    ),
    "checkpoint-truncated": ("the newest checkpoint truncated", _damage(trials.truncate)),
    "checkpoint-flipped": ("the newest checkpoint with a bit flipped", _damage(trials.flip_bit)),
    "checkpoint-missing": ("the newest checkpoint without a rank's file", _damage(trials.lose_file)),
    "disk-full": ("the disk full during a save, and free again", fill_the_disk),
    "nan-once": ("a NaN in a batch, once", partial(poison_a_batch, stays=False)),
    "nan-stays": ("a NaN in a batch, whenever it is read", partial(poison_a_batch, stays=True)),
    "random": ("kill -9 of plain ranks at random instants, saving included", partial(kill_at_random, kills=25, seed=1)),
    "random-asynchronous": (
        "kill -9 of plain ranks at random instants, saving asynchronously",
        partial(kill_at_random, kills=20, seed=2, asynchronous=True),
    ),
    "random-slurm": (
        "kill -9 of a rank or srun at random instants, through Slurm",
        partial(kill_jobs_at_random, kills=5, seed=3),
    ),
}
"""The title of each fault in the table, and its trial, by the short names that `--only` takes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"error: no Slurm: {reason}", file=sys.stderr)
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"
    shutil.rmtree(arguments.folder, ignore_errors=True)
    laboratory = Laboratory(arguments.folder.resolve())
    rows = ["| fault | times | steps lost | seconds to resume | sequence equal |", "|---|---|---|---|---|"]
    results: dict[str, dict[str, object] | None] = {}
    with guarded_cluster() as cluster:
        for name in arguments.only:
            title, trial = FAULTS[name]
            began = time.monotonic()
            try:
                result = trial(laboratory, cluster)
            except Exception:  # noqa: BLE001  the other faults are still injected
                traceback.print_exc()
                results[name] = None
                rows.append(f"| {title} | 1 | all | never | NO |")
            else:
                results[name] = result._asdict()
                cells = f"{result.times} | {result.steps_lost} | {result.seconds_to_resume:.1f}"
                rows.append(f"| {title} | {cells} | {'yes' if result.sequence_equal else 'NO'} |")
            print(f"[{time.monotonic() - began:.0f} s] {name}: {rows[-1]}", flush=True)
    write_json(arguments.folder / "summary.json", results)
    print("\n".join(["", *rows]))
    return 0 if all(result is not None and result["sequence_equal"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
