"""A real run with its real launcher: a second job, a killed rank, and the attempt that resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from pipeline.config.gate import GateSettings
from pipeline.errors import FOLDER_TAKEN, LOST_RANK
from pipeline.run_folder.attempts import read_attempts
from pipeline.run_folder.status import read_status
from pipeline.training.attempt import summarise
from pipeline.training.trainer import Trainer
from tests.training.runs import losses, make_run
from tests.waiting import wait_until

pytestmark = pytest.mark.full

PROJECT = Path(__file__).parents[2]
ENDLESS = 1_000_000


def started(config: Path, attempt: str) -> subprocess.Popen[str]:
    """Two ranks of `scale-cpt train`, as the scripts start them."""
    command = [
        sys.executable,
        "-m",
        "pipeline.local_ranks",
        "2",
        "-m",
        "pipeline",
        "train",
        str(config),
    ]
    environment = {**os.environ, "ATTEMPT": attempt, "EXIT_GRACE_S": "300", "OMP_NUM_THREADS": "1"}
    environment["OMPI_COMM_WORLD_LOCAL_RANK"] = (
        "7"  # of a shell under mpirun, which says nothing of these ranks
    )
    environment.pop(
        "TORCHDYNAMO_DISABLE", None
    )  # once without what tests/distributed.py sets for speed
    return subprocess.Popen(
        command, cwd=PROJECT, env=environment, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_rank_is_named_and_the_next_attempt_resumes(tokens, tmp_path):
    config = make_run(
        tmp_path, tokens, zero=1, schedule__steps=ENDLESS, checkpoints={"every_steps": 2}
    )
    first = started(config, "7.0")
    assert wait_until(lambda: read_status(tmp_path).step >= 2 or first.poll() is not None)
    assert read_status(tmp_path).state == "running"

    second = started(config, "8.0")
    _, refusal = second.communicate()
    assert second.returncode == FOLDER_TAKEN
    [line] = [line for line in refusal.splitlines() if "error" in line]
    assert "is at the stage training in this folder, which only one job may use" in line

    ranks = [child for child in psutil.Process(first.pid).children() if "RANK" in child.environ()]
    doomed = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
    doomed.kill()
    _, said = first.communicate()
    assert first.returncode == 128 + signal.SIGKILL
    [line] = [line for line in said.splitlines() if " E rank 1 on " in line]
    assert "was lost: its process ended or was cut off" in line
    assert "Traceback" not in said

    [attempt] = read_attempts(tmp_path)
    assert attempt.end is not None and attempt.end.exit_code == LOST_RANK
    assert attempt.end.error is not None and "rank 1" in attempt.end.error
    assert read_status(tmp_path).state == "failed"

    steps = attempt.end.step or 0
    again = started(
        make_run(
            tmp_path,
            tokens,
            zero=1,
            schedule__steps=steps + 3,
            init_expansion=str(tmp_path / "initial_expansion"),
        ),
        "7.1",
    )
    _, said = again.communicate()
    assert again.returncode == 0, said
    assert len(losses(tmp_path)) == steps + 3
    done = read_status(tmp_path)
    assert (done.state, done.restarts) == ("done", 1)
    assert not (tmp_path / "training.lock").exists()


@pytest.mark.parametrize("gate", [None, GateSettings()])
def test_the_last_figures_of_a_run_with_a_gate_are_said_to_be_without_it(gate, tmp_path, caplog):
    config = SimpleNamespace(folder=tmp_path, gate=gate)
    score = SimpleNamespace(perplexity=31.5, bits_per_byte=1.25, figures=dict)
    trainer = SimpleNamespace(
        config=config,
        position=SimpleNamespace(step=2, tokens_seen=64, seconds=1.0),
        scores={"old": score},
        step0_difference=0.0,
        engine=SimpleNamespace(trainable_parameters=1, total_parameters=2),
    )
    with caplog.at_level("INFO"):
        summarise(cast("Trainer", trainer))
    notes = [line for line in caplog.messages if "without the gate" in line]
    assert len(notes) == (gate is not None)
