"""The fault suite: injects every known fault into real runs on a real two-node Slurm, and compares
the
results.

python -m tests.faults                       all; prints the table and writes
runs/faults/summary.json python -m tests.faults --only requeue hung   some
"""

# ruff: noqa: T201  (a command line)
from __future__ import annotations

import argparse
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.files.json_files import write_json
from tests.faults import trials
from tests.faults.random_kills import kill_at_borders, kill_at_random, kill_jobs_at_random
from tests.faults.runs import LASTING, Laboratory
from tests.faults.trials import LIMITED, Result, damage_the_newest, poison_a_batch, stop_and_resume
from tests.slurm.cluster import guarded_cluster, unsupported_reason

FAULTS: dict[str, Callable[..., Result]] = {
    "requeue": partial(
        stop_and_resume, inject=trials.requeue, loses_steps=None
    ),  # Slurm sends TERM, and KILL after KillWait
    "time-limit": partial(
        stop_and_resume,
        inject=trials.come_near_the_time_limit,
        shape=LASTING,
        options=LIMITED,
        while_down=trials.lift_the_time_limit,
        loses_steps=False,
    ),
    "term": partial(stop_and_resume, inject=trials.terminate, loses_steps=False),
    "kill-rank": partial(stop_and_resume, inject=trials.kill_rank),
    "kill-launcher": partial(stop_and_resume, inject=trials.kill_launcher),
    "kill-script": partial(stop_and_resume, inject=trials.kill_batch_script, loses_steps=None),
    "daemon": trials.restart_daemons,
    "node": partial(stop_and_resume, inject=trials.lose_node),
    "hung": partial(
        stop_and_resume,
        inject=lambda job: job.stop_between_checkpoints(),
        changes={"watchdog": {"beat_every_s": 1, "dead_after_s": 8}},
        environment={"EXIT_GRACE_S": "5"},
    ),
    "checkpoint-truncated": partial(damage_the_newest, damage=trials.truncate),
    "checkpoint-flipped": partial(damage_the_newest, damage=trials.flip_bit),
    "checkpoint-missing": partial(damage_the_newest, damage=trials.lose_file),
    "disk-full": trials.fill_the_disk,
    "nan-once": partial(poison_a_batch, stays=False),
    "nan-stays": partial(poison_a_batch, stays=True),
    "random": partial(kill_at_random, kills=25, seed=1),
    "random-asynchronous": partial(kill_at_random, kills=20, seed=2, asynchronous=True),
    "random-borders": partial(kill_at_borders, kills=12, seed=5),
    "random-slurm": partial(kill_jobs_at_random, kills=5, seed=3),
}
"""The trial of each fault, by the name that `--only` takes."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    arguments = parser.parse_args()
    if reason := unsupported_reason():
        print(f"error: no Slurm: {reason}", file=sys.stderr)
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"
    shutil.rmtree(arguments.folder, ignore_errors=True)
    laboratory = Laboratory(arguments.folder.resolve())
    rows = [
        "| fault | times | steps lost | seconds to resume | sequence equal |",
        "|---|---|---|---|---|",
    ]
    results: dict[str, Result | None] = {}
    with guarded_cluster() as cluster:
        for name in arguments.only:
            try:
                result = results[name] = FAULTS[name](laboratory, cluster)
            except Exception:  # noqa: BLE001  the other faults are still injected
                traceback.print_exc()
                results[name] = None
                rows.append(f"| {name} | 1 | all | never | NO |")
            else:
                seconds = (
                    "" if result.seconds_to_resume is None else f"{result.seconds_to_resume:.1f}"
                )
                equal = "yes" if result.sequence_equal else "NO"
                rows.append(
                    f"| {name} | {result.times} | {result.steps_lost} | {seconds} | {equal} |"
                )
            print(rows[-1], flush=True)
    write_json(
        arguments.folder / "summary.json",
        {name: one and one._asdict() for name, one in results.items()},
    )
    print("\n".join(["", *rows]))
    return 0 if all(one is not None and one.sequence_equal for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
