"""What the benchmarks of scale share: measurements in own processes, and tables with slopes."""

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
    """What `function` returns in a new process that has only imported its module."""
    # A fork of a server that has imported the module: neither imports nor memory that an earlier
    # measurement left are in this one.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def measured(row: Row, name: str = "") -> Iterator[None]:
    """Adds what the block takes to `row`.

    That is its processor time, memory that stays, peak memory, and files opened.
    """
    # 5 sets the peak of resident memory, VmHWM, to what is resident now (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    files = opened.total()
    resident = _kib("VmRSS")
    began = time.process_time()
    yield
    row[f"{name}cpu_s"] = round(time.process_time() - began, 4)
    row[f"{name}resident_mib"] = round((_kib("VmRSS") - resident) / 1024, 1)
    row[f"{name}peak_mib"] = round((_kib("VmHWM") - resident) / 1024, 1)
    row[f"{name}files"] = opened.total() - files


def _kib(entry: str) -> int:
    """An entry of this process's memory, such as VmRSS."""
    return int(Path("/proc/self/status").read_text().split(f"{entry}:")[1].split()[0])


opened: Counter[str] = Counter()
"""How often this process has opened the files of each name.

Modules of Python and what Linux shows as files do not count."""
_MODULES = (".py", ".pyc", ".so", "entry_points.txt")


# An audit hook sees every file that Python opens, whichever function opens it.
def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, Path)):
        path = Path(arguments[0])
        is_system = path.parts[1:2] in (("proc",), ("sys",))
        if not is_system and not path.name.endswith(_MODULES):
            opened[path.name] += 1


sys.addaudithook(_count)


def slope(rows: Sequence[Row], name: str) -> float | None:
    """The exponent by which a cost grows with the size, from the first row to the last.

    1 is linear. None where the cost is nothing.
    """
    size = next(iter(rows[0]))
    before = rows[0][name]
    after = rows[-1][name]
    if min(before, after) <= 0:
        return None
    # The slope of a line in a plot whose axes are both logarithmic.
    return round(math.log(after / before) / math.log(rows[-1][size] / rows[0][size]), 2)


def report(
    title: str,
    size: str,
    values: Iterable[int],
    row_of: Callable[[int], Row],
    goals: dict[str, float],
) -> Row:
    """Prints a table of what `row_of` measures at each of the `values` of a size; returns it.

    The table has slopes, and whether the last row meets the goals.
    """
    rows = [{size: value, **row_of(value)} for value in values]
    slopes = {name: slope(rows, name) for name in rows[0]}
    header = [size]
    for row in rows:
        header.append(f"{row[size]:,}")
    lines = []
    for name, last in rows[-1].items():
        if name == size:
            continue
        line = [name]
        for row in rows:
            line.append(f"{row[name]:,.4g}")
        line.append(cell(slopes[name], ".2f"))
        line.append(_judged(last, goals.get(name)))
        lines.append(line)
    print(f"\n{title}\n{table([*header, 'slope', 'goal'], lines)}", flush=True)
    applying = {name: goal for name, goal in goals.items() if name in rows[0]}
    return {"title": title, "rows": rows, "slopes": slopes, "goals": applying}


def _judged(found: float, goal: float | None) -> str:
    """Whether a figure meets its goal."""
    if goal is None:
        return ""
    return f"met: {goal:,}" if found <= goal else f"MISSED: {goal:,}"
