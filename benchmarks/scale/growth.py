"""What the benchmarks of scale share: a run, a measurement in a process of its own, a table that
ends with slopes."""

from __future__ import annotations

import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results import Row
from pipeline.evaluation.table import cell, table


def in_own_process(function: Callable[..., Row], *arguments: object) -> Row:
    """What `function` returns in a new process, which has imported its module and done nothing
    else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def measured(row: Row, name: str = "") -> Iterator[None]:
    """Adds to `row` what the block takes: processor time, memory that stays and at its peak, files
    opened."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    files, resident, began = opened.total(), _kib("VmRSS"), time.process_time()
    yield
    row[f"{name}cpu_s"] = round(time.process_time() - began, 4)
    row[f"{name}resident_mib"] = round((_kib("VmRSS") - resident) / 1024, 1)
    row[f"{name}peak_mib"] = round((_kib("VmHWM") - resident) / 1024, 1)
    row[f"{name}files"] = opened.total() - files


def _kib(entry: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{entry}:")[1].split()[0])


opened: Counter[str] = Counter()
"""How often this process has opened the files of each name, but for modules of Python and what
Linux shows as files."""


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, Path)):
        path, modules = Path(arguments[0]), (".py", ".pyc", ".so", "entry_points.txt")
        if path.parts[1:2] not in (("proc",), ("sys",)) and not path.name.endswith(modules):
            opened[path.name] += 1


sys.addaudithook(_count)


def slope(rows: Sequence[Row], name: str) -> float | None:
    """The exponent by which a cost grows with the size, between the first row and the last: 1 is
    linear."""
    size = next(iter(rows[0]))
    before, after = rows[0][name], rows[-1][name]
    if min(before, after) <= 0:
        return None
    return round(math.log(after / before) / math.log(rows[-1][size] / rows[0][size]), 2)


def report(
    title: str,
    size: str,
    values: Iterable[int],
    row_of: Callable[[int], Row],
    goals: dict[str, float],
) -> Row:
    """Prints what `row_of` measures at each of the `values` of a size, with slopes and goals;
    returns the table."""
    rows = [{size: value, **row_of(value)} for value in values]
    slopes = {name: slope(rows, name) for name in rows[0]}
    lines = []
    for name, found in list(rows[-1].items())[1:]:
        goal = (
            f"{'met' if found <= goals[name] else 'MISSED'}: {goals[name]:,}"
            if name in goals
            else ""
        )
        lines.append(
            [name, *(f"{row[name]:,.4g}" for row in rows), cell(slopes[name], ".2f"), goal]
        )
    print(
        f"\n{title}\n{table([size, *(f'{row[size]:,}' for row in rows), 'slope', 'goal'], lines)}",
        flush=True,
    )
    return {
        "title": title,
        "rows": rows,
        "slopes": slopes,
        "goals": {k: goals[k] for k in goals if k in rows[0]},
    }
