"""The phase of each rank, for the watchdog and the metrics, and which rank is lost, hung or at fault."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.profiler import record_function

from pipeline.config.run import WatchdogSettings
from pipeline.errors import INTERRUPTED, LOST_RANK

Phase = Literal[
    "start",
    "data",
    "forward",
    "backward",
    "step",
    "communication",
    "validation",
    "checkpoint",
    "other",
]
SLOW: tuple[Phase, ...] = ("start", "validation", "checkpoint")
"""I/O-bound phases, which may take longer than any part of a step."""


class PhaseState(NamedTuple):
    """A rank's finished steps, its phase, since when (`time.monotonic()`), and its changes of phase so far."""

    step: int
    phase: Phase
    since: float
    entered: int


class Phases:
    """The phases of one rank's main thread: `with phases("forward"): ...`. Any thread may read `state`.

    Time outside of all phases is "other", or "start" before the first step. An inner phase interrupts the outer one, so
    every second counts once. On a GPU a change of phase records a CUDA event instead of the host's clock, which runs
    ahead of the GPU. The events are read after the step, when the host has waited for the loss anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = PhaseState(step=0, phase="start", since=time.monotonic(), entered=0)
        self._device = device
        self._spent: dict[str, float] = defaultdict(float)
        self._marks: list[tuple[Phase, Any]] = [("start", self._now())]

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """The block is `phase`. After an exception the phase stays, to show where the exception was raised."""
        outer = self.state.phase
        self._enter(phase)
        with record_function(phase):  # names it in a trace
            yield
        self._enter(outer)

    def finished(self, step: int) -> None:
        """`step` steps are finished or restored, and the GPU is synchronized."""
        self.state = self.state._replace(step=step)
        self._enter("other")
        self._add_up()

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase since the last call. On a GPU, call it after a synchronization."""
        self._marks.append((self.state.phase, self._now()))
        self._add_up()
        spent, self._spent = self._spent, defaultdict(float)
        return dict(spent)

    def _add_up(self) -> None:
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            self._spent[phase] += self._seconds_between(begin, end)
        del self._marks[:-1]

    def _enter(self, phase: Phase) -> None:
        self.state = PhaseState(self.state.step, phase, time.monotonic(), self.state.entered + 1)
        self._marks.append((phase, self._now()))

    def _now(self) -> Any:  # a float, or a CUDA event
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_between(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin)
        end.synchronize()  # the last one, recorded just now; the others have passed
        return float(begin.elapsed_time(end)) / 1000


# --- Which rank is lost, hung or at fault, judged from the ranks' reports without a common clock ---------------------

_GRACE_S = 3.0
"""Within this time, a fault that all ranks agreed on ends them all."""
_NAMED = 8
"""A line names at most this many ranks."""


@dataclass(frozen=True)
class RankReport:
    """A rank's heartbeat."""

    node: str
    step: int
    """finished steps"""
    phase: str
    phase_s: float
    """how long it has been in it"""
    entered: int
    """its changes of phase; ranks at the same point of the program have the same number"""
    at: str
    """the innermost function of its main thread"""
    waiting: bool
    """whether that function waits for other ranks"""

    @property
    def progress(self) -> str:
        return f"{self.step} step(s) done, in phase {self.phase}"


@dataclass(frozen=True)
class Verdict:
    """Why the run cannot continue, and the rank at fault if any. Ranks have `grace_s` to find it and end themselves."""

    text: str
    rank: int | None
    exit_code: int = LOST_RANK
    grace_s: float = 0.0


INTERRUPTION = Verdict(
    "interrupted (Ctrl-C), without saving", rank=None, exit_code=INTERRUPTED, grace_s=_GRACE_S
)
"""The user wants an end at once. All ranks get the signal, so none of them is at fault."""


class RankHealth:
    """What this rank knows about `ranks`; `now` is always `time.monotonic()`."""

    def __init__(self, ranks: Iterable[int], limits: WatchdogSettings, now: float) -> None:
        self._limits = limits
        self._heard = dict.fromkeys(ranks, now)
        self._reports: dict[int, RankReport] = {}
        self.verdict: Verdict | None = None

    def on_message(self, rank: int, message: dict[str, Any], now: float) -> None:
        """Records a rank's message.

        It is `report` while the rank works; at its end `left`, `interrupted`, or `failed` and `exit_code`.
        """
        if rank not in self._heard:
            return
        if "left" in message:
            del self._heard[rank]
            self._reports.pop(rank, None)
            return
        self._heard[rank] = now
        if "report" in message:
            self._reports[rank] = RankReport(**message["report"])
        elif "interrupted" in message:
            self.accept(INTERRUPTION)
        elif "failed" in message:
            text = f"{self._named(rank)} failed: {message['failed']}"
            self.accept(Verdict(text, rank, message["exit_code"], _GRACE_S))

    @property
    def all_left(self) -> bool:
        """Whether none of the ranks is there any more."""
        return not self._heard

    def on_disconnect(self, rank: int) -> None:
        """Records that the connection to a rank broke, as it does when its process is killed."""
        if rank in self._heard:
            self.accept(
                Verdict(f"{self._named(rank)} was lost: its process ended or was cut off", rank)
            )

    def accept(self, verdict: Verdict) -> None:
        """Adopts a verdict, unless there is one already."""
        self.verdict = self.verdict or verdict

    def extend_deadline(self, pause_s: float) -> None:
        """Extends all deadlines by `pause_s`: this process was stopped itself and could not listen."""
        self._heard = {rank: heard + pause_s for rank, heard in self._heard.items()}

    def judge(self, now: float) -> Verdict | None:
        """Why the run must end; None if it need not."""
        self.verdict = self.verdict or self._find_lost(now) or self._find_hung()
        return self.verdict

    def _find_lost(self, now: float) -> Verdict | None:
        for rank, heard in self._heard.items():
            if now - heard > self._limits.dead_after_s:
                return Verdict(
                    f"{self._named(rank)} was lost: no sign of life for {now - heard:.0f} s", rank
                )
        return None

    def _find_hung(self) -> Verdict | None:
        reports = {rank: report for rank, report in self._reports.items() if rank in self._heard}
        if (
            not reports
            or len(reports) < len(self._heard)
            or not all(map(self._is_late, reports.values()))
        ):
            return None
        hung = find_hung(reports)
        if not hung:
            return Verdict(
                f"all ranks hang, and none is behind the others: {_describe(reports)}", None
            )
        others = {rank: report for rank, report in reports.items() if rank not in hung}
        named = "; ".join(
            f"{self._named(rank)} hangs at {reports[rank].at}" for rank in hung[:_NAMED]
        )
        more = f" and {len(hung) - _NAMED} more" if len(hung) > _NAMED else ""
        shortest_s = min(report.phase_s for report in reports.values())
        waiting = f"; the others wait: {_describe(others)}" if others else ""
        return Verdict(f"{named}{more}, for {shortest_s:.0f} s{waiting}", hung[0])

    def _is_late(self, report: RankReport) -> bool:
        limits = self._limits
        return report.phase_s > (
            limits.slow_after_s if report.phase in SLOW else limits.hung_after_s
        )

    def _named(self, rank: int) -> str:
        report = self._reports.get(rank)
        return f"rank {rank}" + (
            f" on {report.node} ({report.progress})" if report else " (before its first report)"
        )


def find_hung(reports: dict[int, RankReport]) -> list[int]:
    """The ranks that the others wait for: those with the fewest changes of phase, else those that do not wait."""
    fewest = min(report.entered for report in reports.values())
    for suspects in (
        [rank for rank, report in reports.items() if report.entered == fewest],
        [rank for rank, report in reports.items() if not report.waiting],
    ):
        if 0 < len(suspects) < len(reports):
            return sorted(suspects)
    return list(reports) if len(reports) == 1 else []


def _describe(reports: dict[int, RankReport]) -> str:
    """The points that the ranks are at; ranks at the same point share an entry."""
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for rank, report in reports.items():
        ranks_at[f"{report.progress}, at {report.at}"].append(rank)
    entries = []
    for point, ranks in list(ranks_at.items())[:_NAMED]:
        named = ", ".join(f"{rank} on {reports[rank].node}" for rank in sorted(ranks)[:_NAMED])
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        entries.append(f"rank{'s' if len(ranks) > 1 else ''} {named}{more}: {point}")
    return "; ".join(entries)
