"""Where a rank is in its work, for its watchdog, and how its time divides, for the metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.profiler import record_function

from pipeline.errors import LOST_RANK

Phase = Literal["start", "data", "forward", "backward", "step", "communication", "validation", "checkpoint", "other"]
SLOW: tuple[Phase, ...] = ("start", "validation", "checkpoint")
"""Those that read or write much, and may take longer than any part of a step."""


class Place(NamedTuple):
    """A rank's place: how many steps it has finished, its phase, and since when (`time.monotonic()`).

    `entered` counts the changes of phase; ranks at the same point of the program have the same count.
    """

    step: int
    phase: Phase
    since: float
    entered: int


class Phases:
    """The phases of one rank's main thread. What is in none of them is "other", or "start" before the first step.

    An inner phase interrupts the outer one: every second counts once. Any thread may read `place`.

    On a GPU the host runs ahead of its work, so that its clock says nothing about a phase; waiting for the GPU at each
    change of phase would cost more than the figures are worth. So a change records a CUDA event, which the GPU stamps
    when it gets there; the stamps are read after the step, when the loss was waited for anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.place = Place(step=0, phase="start", since=time.monotonic(), entered=0)
        self._device = device
        self._spent: dict[str, float] = defaultdict(float)
        self._marks: list[tuple[Phase, Any]] = [("start", self._moment())]

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """The block is `phase`. After an exception the place stays: that is where it arose."""
        outer = self.place.phase
        self._enter(phase)
        with record_function(phase):  # its name in a trace
            yield
        self._enter(outer)

    def finished(self, step: int) -> None:
        """`step` steps are done, or restored, and a GPU's work was waited for."""
        self.place = self.place._replace(step=step)
        self._enter("other")
        self._add_up()

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase since this was last asked; on a GPU, ask when its work was waited for."""
        self._marks.append((self.place.phase, self._moment()))
        self._add_up()
        spent, self._spent = self._spent, defaultdict(float)
        return dict(spent)

    def _add_up(self) -> None:
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            self._spent[phase] += self._between(begin, end)
        del self._marks[:-1]

    def _enter(self, phase: Phase) -> None:
        self.place = Place(self.place.step, phase, time.monotonic(), self.place.entered + 1)
        self._marks.append((phase, self._moment()))

    def _moment(self) -> Any:  # noqa: ANN401  # a float, or a CUDA event
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:  # noqa: ANN401
        if self._device.type != "cuda":
            return float(end - begin)
        end.synchronize()  # the last one, recorded just now; all others have passed
        return float(begin.elapsed_time(end)) / 1000


# --- Who answers, who is lost, who hangs: judged from what the ranks say of themselves, without clocks in common ----

_PATIENCE_S = 3.0
"""A fault that all ranks agreed on ends them all within this time."""
_NAMED = 8
"""A line names no more ranks than these."""


@dataclass(frozen=True)
class Report:
    """What a rank says of itself: its node, the steps it has finished, its phase and for how long, and where it is.

    `entered` counts its changes of phase, `at` is its main thread's innermost function, and `waiting` says that this
    function waits for other ranks.
    """

    node: str
    step: int
    phase: str
    phase_s: float
    entered: int
    at: str
    waiting: bool

    @property
    def place(self) -> str:
        """For a person."""
        return f"{self.step} step(s) done, in phase {self.phase}"


@dataclass(frozen=True)
class Verdict:
    """Why the run cannot go on, and because of which rank, where one alone is to blame.

    With `patience_s`, ranks that learn of it by themselves may leave by themselves.
    """

    text: str
    culprit: int | None
    exit_code: int = LOST_RANK
    patience_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """How long a rank may be silent, and how long it may stay in one phase: of a step, or a slow one."""

    dead_after_s: float
    hung_after_s: float
    slow_after_s: float

    def hangs(self, report: Report) -> bool:
        """Whether a rank has been in its phase for longer than that may take."""
        return report.phase_s > (self.slow_after_s if report.phase in SLOW else self.hung_after_s)


class RankHealth:
    """What is known of `ranks`."""

    def __init__(self, ranks: Iterable[int], limits: Limits, now: float) -> None:
        self._limits = limits
        self._heard = dict.fromkeys(ranks, now)
        self._reports: dict[int, Report] = {}
        self._verdict: Verdict | None = None

    def on_message(self, rank: int, message: dict[str, Any], now: float) -> None:
        """Takes note of one message of a rank, as `beat`, `goodbye` and `report_failure` make them."""
        if rank not in self._heard:
            return
        if "left" in message:
            del self._heard[rank]
            self._reports.pop(rank, None)
            return
        self._heard[rank] = now
        if "report" in message:
            self._reports[rank] = Report(**message["report"])
        elif "failed" in message:
            text = f"{self._named(rank)} failed: {message['failed']}"
            self.accept(Verdict(text, rank, message["exit_code"], _PATIENCE_S))

    def on_disconnect(self, rank: int) -> None:
        """Takes note that the connection to a rank broke, as it does when its process is killed."""
        if rank in self._heard:
            self.accept(Verdict(f"{self._named(rank)} was lost: its process ended or was cut off", rank))

    def accept(self, verdict: Verdict) -> None:
        """Takes over what another rank found."""
        self._verdict = self._verdict or verdict

    def extend_deadline(self, pause_s: float) -> None:
        """Forgives a silence of `pause_s`: this process was stopped itself, and could not listen."""
        self._heard = {rank: heard + pause_s for rank, heard in self._heard.items()}

    def judge(self, now: float) -> Verdict | None:
        """Why the run must end, or None while all is well."""
        if self._verdict is None:
            self._verdict = self._silent(now) or self._hung()
        return self._verdict

    def _silent(self, now: float) -> Verdict | None:
        for rank, heard in self._heard.items():
            if now - heard > self._limits.dead_after_s:
                return Verdict(f"{self._named(rank)} was lost: no sign of life for {now - heard:.0f} s", rank)
        return None

    def _hung(self) -> Verdict | None:
        reports = {rank: report for rank, report in self._reports.items() if rank in self._heard}
        if not reports or len(reports) < len(self._heard) or not all(map(self._limits.hangs, reports.values())):
            return None
        behind = culprits(reports)
        if not behind:
            return Verdict(f"no rank gets on, and none is behind the others: {_places(reports)}", None)
        others = {rank: report for rank, report in reports.items() if rank not in behind}
        accused = "; ".join(f"{self._named(rank)} hangs at {reports[rank].at}" for rank in behind[:_NAMED])
        more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
        longest = min(report.phase_s for report in reports.values())
        waiting = f"; the others wait: {_places(others)}" if others else ""
        return Verdict(f"{accused}{more}, for {longest:.0f} s{waiting}", behind[0])

    def _named(self, rank: int) -> str:
        report = self._reports.get(rank)
        return f"rank {rank}" + (f" on {report.node} ({report.place})" if report else " (before its first report)")


def culprits(reports: dict[int, Report]) -> list[int]:
    """The ranks for which the others wait: those behind, else those that do not wait; none where all are alike.

    All ranks run the same program, so that the one with the fewest phases is the one that hangs.
    """
    least = min(report.entered for report in reports.values())
    for signs in (
        [rank for rank, report in reports.items() if report.entered == least],
        [rank for rank, report in reports.items() if not report.waiting],
    ):
        if 0 < len(signs) < len(reports):
            return sorted(signs)
    return list(reports) if len(reports) == 1 else []


def _places(reports: dict[int, Report]) -> str:
    """Each one's place; ranks of one place together."""
    together: dict[str, list[int]] = defaultdict(list)
    for rank, report in reports.items():
        together[f"{report.place}, at {report.at}"].append(rank)
    said = [f"{_ranks(ranks, reports)}: {place}" for place, ranks in list(together.items())[:_NAMED]]
    return "; ".join(said)


def _ranks(ranks: Collection[int], reports: dict[int, Report]) -> str:
    named = [f"{rank} on {reports[rank].node}" for rank in sorted(ranks)[:_NAMED]]
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"


# --- messages --------------------------------------------------------------------------------------------------------


def beat(report: Report) -> dict[str, Any]:
    """I am alive."""
    return {"report": asdict(report)}


def goodbye() -> dict[str, Any]:
    """I leave, and nothing is wrong."""
    return {"left": True}


def report_failure(text: str, exit_code: int) -> dict[str, Any]:
    """I end by a fault of my own."""
    return {"failed": text, "exit_code": exit_code}
