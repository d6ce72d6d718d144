"""What the benchmarks of scale share: a measurement in a process of its own, and a table that ends with slopes."""

from __future__ import annotations

import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import safe_open

from pipeline.evaluation.table import table

Row = dict[str, Any]
"""The figures of one size; the first is the size."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def in_own_process(function: Callable[..., Row], *arguments: object) -> Row:
    """What `function` returns in a new process, which has imported its module and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def measured(row: Row, name: str = "") -> Iterator[None]:
    """Adds to `row` what the block takes: processor time, memory that stays and at its peak, files opened.

    Files are those opened through Python or as safetensors, but for modules of Python and what Linux shows as files.
    """
    _CLEAR.write_text("5")  # the peak begins anew
    opened, resident, began = _opened[0], _kib("VmRSS"), time.process_time()
    yield
    row[f"{name}cpu_s"] = round(time.process_time() - began, 4)
    row[f"{name}resident_mib"] = round((_kib("VmRSS") - resident) / 1024, 1)
    row[f"{name}peak_mib"] = round((_kib("VmHWM") - resident) / 1024, 1)
    row[f"{name}files"] = _opened[0] - opened


def _kib(entry: str) -> int:
    return int(_STATUS.read_text().split(f"{entry}:")[1].split()[0])


_opened = [0]
_listeners: list[Callable[[str], None]] = []


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, bytes, Path)):
        path = str(arguments[0])
        if not path.startswith(("/proc/", "/sys/")) and not path.endswith((".py", ".pyc", ".so")):
            _opened[0] += 1
            for listener in _listeners:
                listener(path)


sys.addaudithook(_count)


def on_open(listener: Callable[[str], None], *modules: ModuleType) -> None:
    """Calls `listener` with each file that is opened; `modules` open some with `safe_open`, behind Python's back."""

    def counted(path: Path, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        _count("open", (path,))
        return safe_open(path, *arguments, **named)

    _listeners.append(listener)
    for module in modules:
        vars(module)["safe_open"] = counted


def slope(rows: Sequence[Row], name: str) -> float | None:
    """The exponent by which a cost grows with the size, between the first row and the last: 1 is linear, 0 constant."""
    size = next(iter(rows[0]))
    before, after = rows[0][name], rows[-1][name]
    if not before or not after or rows[-1][size] == rows[0][size]:
        return None
    return round(math.log(after / before) / math.log(rows[-1][size] / rows[0][size]), 2)


def report(title: str, rows: Sequence[Row], goals: Mapping[str, float]) -> Row:
    """Prints a line for each cost: at every size, its slope, its goal. Returns what belongs into the JSON file."""
    size, *names = rows[0]
    slopes = {name: slope(rows, name) for name in names}
    lines = [
        [
            name,
            *(f"{row[name]:,.4g}" for row in rows),
            "" if slopes[name] is None else f"{slopes[name]:.2f}",
            "" if name not in goals else f"{'met' if rows[-1][name] <= goals[name] else 'MISSED'}: {goals[name]:,}",
        ]
        for name in names
    ]
    print(f"\n{title}\n{table([size, *(f'{row[size]:,}' for row in rows), 'slope', 'goal'], lines)}", flush=True)
    return {"title": title, "rows": list(rows), "slopes": slopes, "goals": dict(goals)}
