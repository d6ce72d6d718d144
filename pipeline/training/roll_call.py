"""Who answers, who is lost, who hangs: judged from what the ranks say of themselves, without clocks in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.exit_codes import LOST_RANK
from pipeline.training.phases import SLOW

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


class RollCall:
    """What is known of `ranks`."""

    def __init__(self, ranks: Iterable[int], limits: Limits, now: float) -> None:
        self._limits = limits
        self._heard = dict.fromkeys(ranks, now)
        self._reports: dict[int, Report] = {}
        self._verdict: Verdict | None = None

    def hear(self, rank: int, message: dict[str, Any], now: float) -> None:
        """Takes note of one message of a rank, as `beat`, `farewell` and `last_words` make them."""
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

    def lose(self, rank: int) -> None:
        """Takes note that the connection to a rank broke, as it does when its process is killed."""
        if rank in self._heard:
            self.accept(Verdict(f"{self._named(rank)} was lost: its process ended or was cut off", rank))

    def accept(self, verdict: Verdict) -> None:
        """Takes over what another rank found."""
        self._verdict = self._verdict or verdict

    def excuse(self, pause_s: float) -> None:
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


def farewell() -> dict[str, Any]:
    """I leave, and nothing is wrong."""
    return {"left": True}


def last_words(text: str, exit_code: int) -> dict[str, Any]:
    """I end by a fault of my own."""
    return {"failed": text, "exit_code": exit_code}
