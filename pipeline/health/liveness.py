"""Which rank is lost, hung or at fault, judged from the ranks' reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.health import WatchdogSettings
from pipeline.errors import INTERRUPTED, LOST_RANK
from pipeline.health.phases import SLOW

_GRACE_S = 3.0
"""Within this time, a fault that all ranks agreed on ends them all."""
_MAX_NAMED = 8
"""How many ranks a message names at most."""


@dataclass(frozen=True)
class RankReport:
    """A rank's heartbeat.

    Attributes:
        step: the number of finished steps.
        phase_s: the seconds since the rank entered `phase`.
        entered: how often the rank has changed its phase. Ranks at the same point of the program
            have the same number.
        at: the innermost function of its main thread.
        waiting: whether that function waits for other ranks.
    """

    node: str
    step: int
    phase: str
    phase_s: float
    entered: int
    at: str
    waiting: bool

    @property
    def progress(self) -> str:
        return f"{self.step} step(s) done, in phase {self.phase}"


@dataclass(frozen=True)
class Verdict:
    """Why the run cannot continue.

    Attributes:
        rank: the rank at fault, if any.
        grace_s: how long the ranks may take to end by themselves, before the watchdog ends them.
    """

    text: str
    rank: int | None
    exit_code: int = LOST_RANK
    grace_s: float = 0.0


INTERRUPTION = Verdict(
    "interrupted (Ctrl-C), without saving", rank=None, exit_code=INTERRUPTED, grace_s=_GRACE_S
)
"""The user wants an end at once. All ranks get the signal, so none of them is at fault."""


class RankHealth:
    """The messages of `ranks`, and what follows from them. `now` is always `time.monotonic()`.

    All times are measured by the clock of the rank that judges: the ranks have no common clock.
    """

    def __init__(self, ranks: Iterable[int], limits: WatchdogSettings, now: float) -> None:
        self._limits = limits
        self._heard = dict.fromkeys(ranks, now)
        self._reports: dict[int, RankReport] = {}
        self.verdict: Verdict | None = None

    def on_message(self, rank: int, message: dict[str, Any], now: float) -> None:
        """Records a rank's message.

        It is `report` while the rank works; at its end `left`, `interrupted`, or `failed` and
        `exit_code`.
        """
        if rank not in self._heard:
            return
        if "left" in message:
            del self._heard[rank]
            self._reports.pop(rank, None)
            return
        # Any message is a sign of life.
        self._heard[rank] = now
        if "report" in message:
            self._reports[rank] = RankReport(**message["report"])
        elif "interrupted" in message:
            self.accept(INTERRUPTION)
        elif "failed" in message:
            text = f"{self._described(rank)} failed: {message['failed']}"
            self.accept(Verdict(text, rank, message["exit_code"], _GRACE_S))

    @property
    def all_left(self) -> bool:
        """Whether all ranks have left the run."""
        return not self._heard

    def on_disconnect(self, rank: int) -> None:
        """Records that the connection to a rank broke, as it does when its process is killed."""
        if rank in self._heard:
            text = f"{self._described(rank)} was lost: its process ended or was cut off"
            self.accept(Verdict(text, rank))

    def accept(self, verdict: Verdict) -> None:
        """Adopts a verdict, unless there is one already."""
        # The first verdict names the cause; what is reported after it mostly follows from it.
        if self.verdict is None:
            self.verdict = verdict

    def extend_deadline(self, pause_s: float) -> None:
        """Extends all deadlines by `pause_s`, during which this process was stopped."""
        for rank in self._heard:
            self._heard[rank] += pause_s

    def judge(self, now: float) -> Verdict | None:
        """Why the run must end; None while it can continue."""
        if self.verdict is None:
            self.verdict = self._find_lost(now) or self._find_hung()
        return self.verdict

    def _find_lost(self, now: float) -> Verdict | None:
        for rank, heard in self._heard.items():
            silent_s = now - heard
            if silent_s > self._limits.dead_after_s:
                text = f"{self._described(rank)} was lost: no sign of life for {silent_s:.0f} s"
                return Verdict(text, rank)
        return None

    def _find_hung(self) -> Verdict | None:
        """The run hangs only if every rank is late: one that works will release those that wait."""
        reports: dict[int, RankReport] = {}
        for rank in self._heard:
            report = self._reports.get(rank)
            if report is None or not self._is_late(report):
                return None
            reports[rank] = report
        if not reports:
            return None

        hung = find_hung(reports)
        if not hung:
            text = f"all ranks hang, and none is behind the others: {_points(reports)}"
            return Verdict(text, None)
        places = []
        for rank in hung[:_MAX_NAMED]:
            places.append(f"{self._described(rank)} hangs at {reports[rank].at}")
        text = "; ".join(places) + _and_more(hung)
        shortest_s = min(report.phase_s for report in reports.values())
        text += f", for {shortest_s:.0f} s"
        others = {rank: report for rank, report in reports.items() if rank not in hung}
        if others:
            text += f"; the others wait: {_points(others)}"
        return Verdict(text, hung[0])

    def _is_late(self, report: RankReport) -> bool:
        if report.phase in SLOW:
            return report.phase_s > self._limits.slow_after_s
        return report.phase_s > self._limits.hung_after_s

    def _described(self, rank: int) -> str:
        report = self._reports.get(rank)
        if report is None:
            return f"rank {rank} (before its first report)"
        return f"rank {rank} on {report.node} ({report.progress})"


def find_hung(reports: dict[int, RankReport]) -> list[int]:
    """The ranks that the others wait for, in ascending order; none if that cannot be told.

    They are the ranks with the fewest changes of phase, which are behind the others. Where all have
    the same number, they are the ranks whose main thread does not wait for another rank.
    """
    if len(reports) == 1:
        return list(reports)
    fewest = min(report.entered for report in reports.values())
    behind = [rank for rank, report in reports.items() if report.entered == fewest]
    if len(behind) < len(reports):
        return sorted(behind)
    busy = [rank for rank, report in reports.items() if not report.waiting]
    if 0 < len(busy) < len(reports):
        return sorted(busy)
    return []


def _points(reports: dict[int, RankReport]) -> str:
    """The points of the program that the ranks are at; ranks at the same point share an entry."""
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for rank, report in reports.items():
        ranks_at[f"{report.progress}, at {report.at}"].append(rank)
    entries = []
    for point, ranks in list(ranks_at.items())[:_MAX_NAMED]:
        noun = "rank" if len(ranks) == 1 else "ranks"
        named = ", ".join(f"{rank} on {reports[rank].node}" for rank in sorted(ranks)[:_MAX_NAMED])
        entries.append(f"{noun} {named}{_and_more(ranks)}: {point}")
    return "; ".join(entries)


def _and_more(ranks: Sequence[int]) -> str:
    """How many ranks a message leaves out."""
    if len(ranks) <= _MAX_NAMED:
        return ""
    return f" and {len(ranks) - _MAX_NAMED} more"
