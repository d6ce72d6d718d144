"""Whether a choice lies on or beyond the frontier of runs whose settings were chosen by hand: those of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StudyError
from pipeline.exit_codes import CONFIG_ERROR
from pipeline.run_folder.averages import geometric_mean
from pipeline.run_folder.study_summary import REPLAY, read_rows, read_tried
from pipeline.search.judgement import Probe


@dataclass(frozen=True)
class Point:
    """Where a run ended: held-out perplexity of what was new, and of what was known."""

    label: str
    new: float
    replay: float

    def beats(self, other: Point) -> bool:
        """Whether it learned as much and kept as much, and more of one of them."""
        as_good = self.new <= other.new and self.replay <= other.replay
        return as_good and (self.new < other.new or self.replay < other.replay)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats, what learned most first."""
    return sorted((one for one in points if not any(other.beats(one) for other in points)), key=lambda one: one.new)


def verdict(choice: Point, by_hand: Sequence[Point]) -> str:
    """In a line: on the frontier, beyond it, or behind which run."""
    if behind := [one for one in frontier(by_hand) if one.beats(choice)]:
        return f"behind the frontier of {len(by_hand)} runs by hand: {_named(behind)} learned and kept as much or more"
    passed = [one for one in frontier(by_hand) if choice.beats(one)]
    if passed:
        return f"beyond the frontier of {len(by_hand)} runs by hand: better than {_named(passed)}"
    return f"on the frontier of {len(by_hand)} runs by hand: none learned as much and kept as much"


@dataclass(frozen=True)
class ByHand:
    """The runs of the first seed in the folder of a finished study, which is `source`."""

    source: Path
    points: list[Point]
    replay_before: float
    """perplexity of the corpora of role replay before training: their geometric mean"""

    def verdict_on(self, probe: Probe) -> str:
        """Holds a whole run against them.

        Raises:
            StudyError: it began with another perplexity.
        """
        if not math.isclose(probe.replay_before, self.replay_before, rel_tol=1e-4):
            raise StudyError(
                f"{self.source}: expected replay perplexity {probe.replay_before:.2f} before training, as the probes "
                f"had, found {self.replay_before:.2f}; take its base, held-out files and validation.max_sequences",
                CONFIG_ERROR,
            )
        return verdict(Point("the choice", probe.new_perplexity, probe.replay_perplexity), self.points)


def read_by_hand(study: Path, steps: int) -> ByHand:
    """Reads the figures of a study whose runs took so many steps.

    Raises:
        RunFolderError: it is not finished.
        StudyError: its runs are of another length, or nothing that was known before was measured.
    """
    known, tried = read_rows(study)[0], read_tried(study)
    if known.steps != steps:
        raise StudyError(
            f"{study}: expected runs of {steps} steps, as the last round's, found {known.steps}; "
            f"end --steps with {known.steps}",
            CONFIG_ERROR,
        )
    replayed = [known.before[name] for name, role in known.roles.items() if role == REPLAY and name in known.before]
    if not replayed:
        raise StudyError(
            f"{study}: expected a held-out part of a corpus of role replay, found none; compare with another study",
            CONFIG_ERROR,
        )
    points = [
        Point(f"{one.label} at {one.learning_rate:g}", one.new_perplexity, one.replay_perplexity)
        for one in tried
        if one.new_perplexity is not None and one.replay_perplexity is not None  # else it diverged
    ]
    return ByHand(study, points, geometric_mean([figures["perplexity"] for figures in replayed]))


def _named(points: Sequence[Point]) -> str:
    return ", ".join(f"{one.label} ({one.new:.2f}, {one.replay:.2f})" for one in points)
