"""What cleaning did, for people: a table, examples, and a page of pictures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import zstandard
from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.cleaning.stages import DROPPED, script_share
from pipeline.errors import DataError

PAGE = "report.html"
Counts = Mapping[str, Mapping[str, int]]
"""What each step did: see `CleanedText.steps`."""
_SAMPLED = 20_000
"""Documents in a picture, at most: the first ones of each shard."""
_LENGTHS = (0, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)
_TEMPLATES = Environment(loader=PackageLoader("pipeline.cleaning", ""), autoescape=True, undefined=StrictUndefined)


class Bar(NamedTuple):
    """A bar of a picture."""

    label: str
    documents: int
    height: float


def table(steps: Counts) -> str:
    """What each step did, as lines of text."""
    lines = [f"{'step':<16}{'documents':>12}{'dropped':>12}{'changed':>12}  reasons"]
    for name, found in steps.items():
        counts = "".join(f"{found.get(key, 0):>12,}" for key in ("total", "dropped", "changed"))
        lines.append(f"{name:<16}{counts}  {_reasons(found)}".rstrip())
    return "\n".join(lines)


def examples(folder: Path, count: int) -> Iterator[str]:
    """The beginnings of `count` documents that each step dropped, and why."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; run scale-cpt clean first")
    for step in sorted(folder.glob(f"{DROPPED}/*")):
        for document in islice(_documents(step, count), count):
            reason = document["reason"] and f" ({document['reason']})"
            yield f"{step.name}{reason}: {' '.join(document['text'].split())[:200]}"


def write_page(folder: Path, title: str, steps: Counts, script: re.Pattern[str], copies: Path) -> None:
    """Writes the page into a folder of cleaned text; `copies` has the sizes of the clusters that datatrove found."""
    dropped = {name: folder / DROPPED / name for name in steps if (folder / DROPPED / name).is_dir()}
    found = {group: _measured(of, script) for group, of in {"kept": folder, **dropped}.items()}
    sizes = Counter[int]()
    for file in copies.glob("*.sizes"):  # of each copy its number and the size of its cluster
        sizes.update(np.fromfile(file, "<u4")[1::2].tolist())
    page = _TEMPLATES.get_template("report.html.j2").render(
        title=title,
        steps=[(name, counts, _reasons(counts)) for name, counts in steps.items()],
        most=max(counts.get("total", 0) for counts in steps.values()),
        lengths={group: _histogram(lengths, _LENGTHS) for group, (lengths, _) in found.items()},
        shares={group: _histogram(shares, range(0, 100, 10)) for group, (_, shares) in found.items()},
        clusters=_bars({f"{size:,}": round(count / size) for size, count in sorted(sizes.items())}),
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def _reasons(counts: Mapping[str, int]) -> str:
    reasons = Counter({key[8:]: count for key, count in counts.items() if key.startswith("dropped_")})
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common(3))


def _documents(folder: Path, most: int) -> Iterator[dict[str, Any]]:
    """The documents in the shards of `folder`, about `most`: equally many of each shard."""
    shards = sorted(folder.glob("*.jsonl.zst"))
    for shard in shards:
        with zstandard.open(shard, "rt", encoding="utf-8") as lines:
            yield from map(orjson.loads, islice(lines, most // len(shards) + 1))


def _measured(folder: Path, script: re.Pattern[str]) -> tuple[list[int], list[float]]:
    """The lengths of the documents in `folder`, and the percentages of their letters in a script."""
    lengths, shares = [], []
    for document in _documents(folder, _SAMPLED):
        lengths.append(document.get("characters") or len(document["text"]))
        shares.append(100 * script_share(script, document["text"]))
    return lengths, shares


def _histogram(values: Sequence[float], starts: Sequence[int]) -> list[Bar]:
    """How many values are from one of `starts` to the next."""
    counts, _ = np.histogram(values, bins=[*starts, np.inf])
    return _bars({f"from {start:,}": int(count) for start, count in zip(starts, counts, strict=True)})


def _bars(counts: Mapping[str, int]) -> list[Bar]:
    return [Bar(label, count, 100 * count / max(1, *counts.values())) for label, count in counts.items()]
