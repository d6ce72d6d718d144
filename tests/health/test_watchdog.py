"""Ranks that are killed, stopped, hung or failed: the others name the rank and end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Timer
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from pipeline import log
from pipeline.config.health import WatchdogSettings as Settings
from pipeline.errors import INTERNAL_FAULT, INTERRUPTED, LOST_RANK, DataError
from pipeline.health.liveness import INTERRUPTION
from pipeline.health.phases import Phases
from pipeline.health.watchdog import RankWatchdog, heartbeat_interval_s
from pipeline.parallel.ranks import run_on_all_ranks
from pipeline.training.launch import StopSignals
from tests.distributed import processes
from tests.waiting import PATIENCE_S, wait_until

RANKS = 3
# A busy machine delays a rank for seconds: only the limit that a scenario waits for is short.
PATIENT = Settings(beat_every_s=0.2, dead_after_s=300, hung_after_s=300, slow_after_s=300)
SOON_DEAD = PATIENT.model_copy(update={"dead_after_s": 6})
SOON_HUNG = PATIENT.model_copy(update={"hung_after_s": 5})
SAVE_S = 7.0


class End(NamedTuple):
    code: int
    lines: list[str]
    """The rank's stderr."""

    @property
    def errors(self) -> list[str]:
        """The error lines, without their time."""
        return [line.split(" ", 1)[1] for line in self.lines if " E " in line]


def start(
    scenario: Callable[[Phases], None], folder: Path, limits: Settings
) -> list[ForkServerProcess]:
    ranks = [
        processes.Process(target=_rank, args=(scenario, folder, limits, rank), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    return ranks


def await_ends(
    ranks: list[ForkServerProcess], folder: Path, stopped: int | None = None
) -> list[End]:
    for rank, process in enumerate(ranks):
        if rank != stopped:
            process.join(timeout=PATIENCE_S)
    for process in ranks:
        process.kill()
        process.join()
    logs = [
        (folder / f"{rank}.log").read_text(encoding="utf-8").splitlines() for rank in range(RANKS)
    ]
    return [End(process.exitcode or 0, lines) for process, lines in zip(ranks, logs, strict=True)]


def _rank(scenario: Callable[[Phases], None], folder: Path, limits: Settings, rank: int) -> None:
    descriptor = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), SLURMD_NODENAME=f"n{rank}")
    torch.set_num_threads(1)
    log.configure()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    phases = Phases(torch.device("cpu"))
    with (
        StopSignals() as signals,
        RankWatchdog(
            limits, phases, folder / "stacks", is_interrupted=signals.is_insistent
        ) as watchdog,
    ):
        heard = watchdog._health
        assert wait_until(lambda: heard._reports.keys() == heard._heard.keys(), every_s=0.01)
        scenario(phases)
    dist.destroy_process_group()


def steps(phases: Phases, disturb: Callable[[], None], *, count: int = 8) -> None:
    """Steps of a tenth of a second; `disturb` is called in the data phase of the third."""
    for step in range(count):
        with phases("data"):
            if step == 2:
                disturb()
            time.sleep(0.1)
        with phases("forward"):
            dist.all_reduce(torch.ones(1))
        phases.finished(step + 1)


def hang() -> None:
    time.sleep(PATIENCE_S)


def fail() -> None:
    raise ValueError("no such sample")


def users_fault() -> None:
    raise DataError("corpus: gone")


def interrupted() -> None:
    raise KeyboardInterrupt


def stopped_before_two_keystrokes(phases: Phases) -> None:
    """The last rank stops. The others wait in a collective, where Python handles no signal."""
    if dist.get_rank() == RANKS - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    for after_s in (0.5, 1.5):
        Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    steps(phases, lambda: None)


def killed(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)


def disturbed(rank: int, disturb: Callable[[], None], phases: Phases) -> None:
    def disturb_this_rank() -> None:
        if dist.get_rank() == rank:
            disturb()

    steps(phases, disturb_this_rank)


def paused() -> None:
    """Stops the process for longer than a phase may take, as Slurm does that suspends a job."""
    continued = f"sleep {SOON_HUNG.hung_after_s + 2}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", continued]):
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # The phase goes on for some heartbeats.


def agreed_fault(phases: Phases) -> None:
    """A fault of one rank, which all ranks raise together."""

    def fault_on_last_rank() -> None:
        if dist.get_rank() == RANKS - 1:
            users_fault()

    steps(phases, lambda: run_on_all_ranks(fault_on_last_rank))


def all_slow(phases: Phases) -> None:
    """A save longer than a step may take, followed by steps."""
    with phases("checkpoint"):
        time.sleep(SAVE_S)
    steps(phases, lambda: None)


SCENARIOS: dict[str, tuple[Callable[[Phases], None], Settings, int | None]] = {
    "all slow": (all_slow, SOON_HUNG, None),
    "last stopped": (partial(disturbed, 2, partial(killed, signal.SIGSTOP)), SOON_DEAD, 2),
    "last hangs": (partial(disturbed, 2, hang), SOON_HUNG, None),
    "first hangs": (partial(disturbed, 0, hang), SOON_HUNG, None),
    "all paused": (partial(steps, disturb=paused), SOON_HUNG, None),
    "nothing": (partial(disturbed, -1, fail), PATIENT, None),
    "last killed": (partial(disturbed, 2, partial(killed, signal.SIGKILL)), PATIENT, None),
    "first killed": (partial(disturbed, 0, partial(killed, signal.SIGKILL)), PATIENT, None),
    "last fails": (partial(disturbed, 2, fail), PATIENT, None),
    "users fault": (partial(disturbed, 2, users_fault), PATIENT, None),
    "agreed fault": (agreed_fault, PATIENT, None),
    "last interrupted": (partial(disturbed, 2, interrupted), PATIENT, None),
    "first interrupted": (partial(disturbed, 0, interrupted), PATIENT, None),
    "two keystrokes": (stopped_before_two_keystrokes, PATIENT, 2),
}
"""What the ranks do, the limits, and the rank that is stopped, to be killed after the others have
ended.
"""
TOGETHER = 5
"""The first of them mostly wait, and run at the same time."""


@pytest.fixture(scope="module")
def ends_of(tmp_path_factory) -> Callable[[str], tuple[Path, list[End]]]:
    """The folder and the ends of a scenario's ranks."""
    folders = {name: tmp_path_factory.mktemp("ranks") for name in SCENARIOS}

    def started(name: str) -> list[ForkServerProcess]:
        scenario, limits, _ = SCENARIOS[name]
        return start(scenario, folders[name], limits)

    def ended(name: str, ranks: list[ForkServerProcess]) -> list[End]:
        _, _, stopped_rank = SCENARIOS[name]
        return await_ends(ranks, folders[name], stopped_rank)

    running = {name: started(name) for name in [*SCENARIOS][:TOGETHER]}
    ends = {name: ended(name, ranks) for name, ranks in running.items()}

    def ends_of_scenario(name: str) -> tuple[Path, list[End]]:
        if name in ends:
            return folders[name], ends[name]
        return folders[name], ended(name, started(name))

    return ends_of_scenario


@pytest.mark.parametrize("scenario", ["nothing", "all slow", "all paused"])
def test_ranks_that_work_are_left_alone(scenario, ends_of):
    _, ends = ends_of(scenario)
    assert [end.code for end in ends] == [0] * RANKS
    assert [end.errors for end in ends] == [[]] * RANKS


@pytest.mark.parametrize(
    ("scenario", "lost", "reason"),
    [
        ("last killed", 2, r"was lost: its process ended or was cut off"),
        ("first killed", 0, r"was lost: its process ended or was cut off"),
        ("last stopped", 2, r"was lost: no sign of life for \d+ s"),
    ],
)
def test_a_lost_rank_is_named_by_all_others_in_one_line(scenario, lost, reason, ends_of):
    folder, ends = ends_of(scenario)
    assert ends[lost].code == -signal.SIGKILL
    line = re.compile(rf"rank {lost} on n{lost} \(\d step\(s\) done, in phase \w+\) {reason}$")
    for rank in {0, 1, 2} - {lost}:
        end = ends[rank]
        assert end.code == LOST_RANK, end
        assert len(end.errors) == 1 and line.search(end.errors[0]), end
        assert end.errors[0].startswith(f"[{rank}@n{rank}]")
        assert not [text for text in end.lines if "Traceback" in text], end
        # In a step still, or on its way out of one that a broken connection ended.
        assert re.search(
            "in (steps|__exit__)", (folder / "stacks" / f"rank_0000{rank}.txt").read_text()
        )


@pytest.mark.parametrize(("scenario", "hung"), [("last hangs", 2), ("first hangs", 0)])
def test_a_hung_rank_is_distinguished_from_those_that_wait(scenario, hung, ends_of):
    folder, ends = ends_of(scenario)
    assert [end.code for end in ends] == [LOST_RANK] * RANKS
    for end in ends:
        assert f"rank {hung} on n{hung} (2 step(s) done, in phase data) hangs at" in end.errors[0]
        assert "the others wait" in end.errors[0] and len(end.errors) == 1
    assert "in hang" in (folder / "stacks" / f"rank_0000{hung}.txt").read_text()


@pytest.mark.parametrize(
    ("scenario", "code", "fault"),
    [
        ("last fails", INTERNAL_FAULT, "ValueError: no such sample"),
        ("users fault", 1, "corpus: gone"),
    ],
)
def test_the_others_repeat_the_fault_of_a_failed_rank_in_one_line(scenario, code, fault, ends_of):
    _, ends = ends_of(scenario)
    assert [end.code for end in ends] == [code, code, 1]  # multiprocessing's own 1
    assert fault in ends[2].lines[-1], "the traceback is its own"
    for end in ends[:2]:
        assert end.errors[0].endswith(f"failed: {fault}")
        assert not [text for text in end.lines if "Traceback" in text]


def test_a_fault_that_all_agreed_on_is_not_repeated(ends_of):
    _, ends = ends_of("agreed fault")
    assert [end.code for end in ends] == [1, 1, 1]
    assert [end.errors for end in ends] == [[], [], []]


@pytest.mark.parametrize(
    ("scenario", "on_its_own"), [("last interrupted", 2), ("first interrupted", 0)]
)
def test_an_interrupted_rank_ends_all_and_blames_none(scenario, on_its_own, ends_of):
    _, ends = ends_of(scenario)
    assert ends[on_its_own].lines[-1] == "KeyboardInterrupt"
    for rank in {0, 1, 2} - {on_its_own}:
        assert ends[rank].code == INTERRUPTED, ends[rank]
        assert ends[rank].errors == [f"[{rank}@n{rank}] E {INTERRUPTION.text}"]


def test_a_second_keystroke_ends_ranks_that_wait_in_a_collective(ends_of):
    folder, ends = ends_of("two keystrokes")
    for rank in (0, 1):
        assert ends[rank].code == INTERRUPTED, ends[rank]
        assert ends[rank].errors == [f"[{rank}@n{rank}] E {INTERRUPTION.text}"]
        assert "in all_reduce" in (folder / "stacks" / f"rank_0000{rank}.txt").read_text()


@pytest.mark.parametrize(
    ("ranks", "every_s"), [(8, 5), (500, 5), (1024, 10.24), (4096, 30), (100_000, 30)]
)
def test_of_thousands_each_sends_less_often_but_twice_before_it_is_given_up(ranks, every_s):
    limits = Settings(beat_every_s=5, dead_after_s=60)
    assert heartbeat_interval_s(limits, ranks) == every_s
    impatient = Settings(beat_every_s=5, dead_after_s=4)
    assert heartbeat_interval_s(impatient, ranks) == 2
