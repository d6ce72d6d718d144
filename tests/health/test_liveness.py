"""The phases of a rank and their times; and which rank the watchdog blames."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

import pytest
import torch

from pipeline.config.health import WatchdogSettings
from pipeline.errors import LOST_RANK
from pipeline.health.liveness import RankHealth, RankReport
from pipeline.health.phases import Phases

LIMITS = WatchdogSettings(dead_after_s=10, hung_after_s=100, slow_after_s=300)
WORKING = RankReport(
    node="n1",
    step=5,
    phase="forward",
    phase_s=1,
    entered=40,
    at="linear (linear.py:9)",
    waiting=False,
)
WAITING = replace(WORKING, phase_s=150, at="all_reduce (distributed_c10d.py:3)", waiting=True)


def heartbeat(report: RankReport) -> dict[str, object]:
    return {"report": asdict(report)}


def health_of(*reports: RankReport, now: float = 0) -> RankHealth:
    health = RankHealth(range(len(reports)), LIMITS, now)
    for rank, report in enumerate(reports):
        health.on_message(rank, heartbeat(replace(report, node=f"n{rank}")), now)
    return health


def text(health: RankHealth, now: float = 1) -> str:
    verdict = health.judge(now)
    assert verdict is not None and verdict.exit_code == LOST_RANK and "\n" not in verdict.text
    return verdict.text


def test_working_ranks_are_not_blamed():
    assert health_of(WORKING, WORKING).judge(now=9) is None
    assert health_of(WAITING, WORKING).judge(now=9) is None, (
        "one that waits long is not hung while another works"
    )


def test_a_silent_rank_is_lost_and_its_last_report_is_shown():
    health = health_of(WORKING, WORKING)
    health.on_message(0, heartbeat(WORKING), now=15)
    assert text(health, now=16) == (
        "rank 1 on n1 (5 step(s) done, in phase forward) was lost: no sign of life for 16 s"
    )


def test_a_broken_connection_is_a_lost_rank_and_the_first_verdict_stays():
    health = health_of(WORKING, WORKING)
    health.on_disconnect(1)
    health.on_disconnect(0)
    assert text(health).startswith(
        "rank 1 on n1 (5 step(s) done, in phase forward) was lost: its process ended"
    )


def test_a_rank_that_ended_is_not_missed_and_a_pause_of_this_rank_extends_the_deadline():
    health = health_of(WORKING, WORKING)
    health.on_message(1, {"left": True}, now=1)
    health.on_disconnect(1)
    health.on_message(0, heartbeat(WORKING), now=50)
    assert health.judge(now=55) is None
    health = health_of(WORKING, WORKING)
    health.extend_deadline(60)
    assert health.judge(now=65) is None
    assert health.judge(now=71) is not None


def test_a_failed_rank_gives_its_reason_and_exit_code():
    health = health_of(WORKING, WORKING)
    health.on_message(1, {"failed": "no space left", "exit_code": 1}, now=1)
    verdict = health.judge(now=1)
    assert verdict is not None and verdict.exit_code == 1 and verdict.grace_s > 0
    assert verdict.text == "rank 1 on n1 (5 step(s) done, in phase forward) failed: no space left"


def test_of_hung_ranks_the_one_behind_is_named_else_the_one_that_does_not_wait_else_all():
    behind = replace(WAITING, phase="data", entered=39, at="read (samples.py:7)", waiting=False)
    said = text(health_of(WAITING, behind, WAITING))
    assert said.startswith(
        "rank 1 on n1 (5 step(s) done, in phase data) hangs at read (samples.py:7), for 150 s; "
    )
    assert "ranks 0 on n0, 2 on n2: 5 step(s) done, in phase forward, at all_reduce" in said
    alone = replace(WAITING, at="sleep (x.py:1)", waiting=False)
    assert text(health_of(WAITING, alone)).startswith("rank 1 on n1 (")
    assert text(health_of(alone)).endswith("hangs at sleep (x.py:1), for 150 s")
    said = text(health_of(WAITING, WAITING))
    assert said.startswith(
        "all ranks hang, and none is behind the others: ranks 0 on n0, 1 on n1: 5 step(s) done"
    )


@pytest.mark.parametrize(("seconds", "hung"), [(299, False), (301, True)])
def test_a_slow_phase_may_take_longer(seconds, hung):
    saving = replace(WAITING, phase="checkpoint", phase_s=seconds)
    assert (health_of(saving, saving).judge(now=1) is not None) == hung


def test_a_thousand_ranks_make_one_readable_line():
    said = text(health_of(*[WAITING] * 999, replace(WAITING, entered=39)))
    assert said.startswith("rank 999 on n999 (") and "and 991 more" in said
    assert len(said) < 500


def test_an_inner_phase_interrupts_the_outer_one_and_no_second_counts_twice():
    phases = Phases(torch.device("cpu"))
    before = time.perf_counter()
    phases.seconds()
    begin = time.perf_counter()
    with phases("step"):
        time.sleep(0.02)
        with phases("communication"):
            time.sleep(0.03)
        assert phases.state.phase == "step"
        time.sleep(0.02)
    end = time.perf_counter()
    spent = phases.seconds()
    after = time.perf_counter()
    assert spent["step"] >= 0.04
    assert spent["communication"] >= 0.03
    assert end - begin <= sum(spent.values()) <= after - before
    assert "step" not in phases.seconds(), "each call starts from zero"
    with pytest.raises(ValueError, match="here"), phases("backward"):
        raise ValueError("here")
    assert phases.state.phase == "backward"
