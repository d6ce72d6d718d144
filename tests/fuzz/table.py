"""The results of a fuzz: a table of outcomes for each target, the faults that were found, and summary.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.files import write_json

GOOD = ("right", "refused")
OUTCOMES = (*GOOD, "traceback", "hang", "abort", "silent change", "memory", "vague")
"""`vague`: refused by a UserError that names no file of the input, or in more than a line's length."""


@dataclass(frozen=True)
class Result:
    """How one input ended.

    Attributes:
        number: of the input; with the seed it makes the input again.
        damage: what was done to the sound input.
        why: the error, in one line.
        blame: the project's file and line that raised it, or where it hung.
        seconds, peak_mib: of the child; its memory includes some 350 MiB of imported packages.
    """

    number: int
    target: str
    subject: str
    outcome: str
    damage: str
    why: str = ""
    blame: str = ""
    seconds: float = 0.0
    peak_mib: int = 0

    @property
    def is_good(self) -> bool:
        """Whether the project did what it promises."""
        return self.outcome in GOOD

    @property
    def signature(self) -> tuple[str, str, str]:
        """Equal for results of one fault."""
        return self.target, self.outcome, self.blame or re.sub(r"[\d'\"].*", "", self.why)


def as_text(results: Sequence[Result]) -> str:
    """Columns under their titles: a row for each target, and one for all."""
    seen = [outcome for outcome in OUTCOMES if outcome in GOOD or any(result.outcome == outcome for result in results)]
    rows = [("target", "inputs", *seen, "slowest s", "peak MiB")]
    for target in [*dict.fromkeys(result.target for result in results), "all"]:
        own = [result for result in results if target in (result.target, "all")]
        counts = Counter(result.outcome for result in own)
        slowest, peak = max(result.seconds for result in own), max(result.peak_mib for result in own)
        rows.append((target, str(len(own)), *(str(counts[outcome]) for outcome in seen), f"{slowest:.1f}", str(peak)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def faults_as_text(results: Sequence[Result], seed: int) -> str:
    """A paragraph for each kind of fault, the most frequent first, with inputs that show it."""
    kinds: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        if not result.is_good:
            kinds.setdefault(result.signature, []).append(result)
    paragraphs = []
    for (target, outcome, _), found in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        first = found[0]
        numbers = ", ".join(str(result.number) for result in found[:6])
        paragraphs.append(
            f"{len(found)} x {outcome}: {target} ({', '.join(sorted({result.subject for result in found}))}), "
            f"{first.blame or 'no line of the project'}\n"
            f"    {first.why[:240]}\n    {first.damage[:200]}\n    seed {seed}, inputs {numbers}"
        )
    return "\n".join(paragraphs)


def write_summary(path: Path, results: Sequence[Result], seed: int) -> None:
    """Writes summary.json: the seed, the outcomes of each target, and every result that is not good."""
    outcomes: dict[str, Counter[str]] = {}
    for result in results:
        outcomes.setdefault(result.target, Counter())[result.outcome] += 1
    bad = [asdict(result) for result in results if not result.is_good]
    write_json(path, {"seed": seed, "inputs": len(results), "outcomes": outcomes, "faults": bad})
