"""Rank-aware logging and progress.

Library code asks for a logger; only the command lines call `configure`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any, TypeVar, cast

from tqdm import tqdm
from tqdm.utils import disp_len

_FORMAT = "%(asctime)s %(where)s %(levelname).1s %(message)s"
_BEFORE_THE_FIRST_S = 1.0
_BETWEEN_DRAWINGS_S = 0.2
_BETWEEN_LOG_LINES_S = 30.0
_BEFORE_THE_FIRST_LOG_LINE_S = 5.0
_LOG_LINE = (
    "{desc}: {counted} of {counted_in_all}{unit} ({percentage:.0f} %), {rate_noinv_fmt}{postfix}, "
    "{remaining} left"
)
_BAR = "{l_bar}{bar}| {counted}/{counted_in_all} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_BAR_COLUMNS = 10
"""The least width of a bar, before its figures."""
_COLUMNS = 80
"""The width of a terminal that does not say how wide it is."""
_ERASED = "\r\x1b[K"
_T = TypeVar("_T")


class _RankFilter(logging.Filter):
    """Adds `rank@node` to every record, and drops records below WARNING on ranks other than 0."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.where = "[main]"
        if world_size > 1:
            self.where = f"[{rank}@{node()}]"

    def filter(self, record: logging.LogRecord) -> bool:
        record.where = self.where
        # A thousand ranks that log the same line would hide the one that differs.
        return self.rank == 0 or record.levelno >= logging.WARNING


def get_logger(name: str) -> logging.Logger:
    """A logger below the package's own, so that `configure` applies to all of them."""
    return logging.getLogger(f"pipeline.{name.removeprefix('pipeline.')}")


def node() -> str:
    """This machine's name: Slurm's, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def configure(level: int = logging.INFO) -> None:
    """Sends the package's records to stderr, with the rank that the environment names."""
    handler = _StderrHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(
        _RankFilter(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    )
    root = logging.getLogger("pipeline")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False  # a library may have configured the root logger


_logger = get_logger(__name__)


def clear_terminal_line() -> None:
    """Erases the line in which the cursor stands, if stderr is a terminal.

    A progress bar may stand there, of this process or of another one, and would be glued to the
    next line.
    """
    if sys.stderr.isatty():
        sys.stderr.write(_ERASED)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records to stderr, each in a line of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            clear_terminal_line()
        super().emit(record)


class ProgressBar(tqdm):  # type: ignore[type-arg]  # not used as an iterator
    """A bar on a terminal, occasional lines in a log; see `progress_bar`."""

    monitor_interval = 0  # no thread of its own
    _figures: Sequence[str] = ()

    def move_to(self, done: float, figures: Sequence[str] = (), *, show: bool = False) -> None:
        """Sets how much is done, which may be less than before, and draws if it is time to.

        Args:
            figures: are shown after the bar, the most important one first: a narrow terminal shows
                as many as fit.
            show: draws in any case.
        """
        self._figures = figures
        drawn = self.update(done - self.n)
        if show and not drawn:
            self.refresh()

    def __str__(self) -> str:
        values = self.format_dict
        count = len(self._figures)
        if values["bar_format"] == _LOG_LINE:
            # A line of a log has all figures, however long it becomes.
            return self._drawn(values, count)
        # A character in the last column would make the terminal wrap.
        columns = (values["ncols"] or _COLUMNS) - 1
        values["ncols"] = columns
        while count > 0 and self._columns_beside_bar(values, count) + _BAR_COLUMNS > columns:
            count -= 1
        return self._drawn(values, count)

    def _columns_beside_bar(self, values: Mapping[str, Any], count: int) -> int:
        without_bar = {**values, "bar_format": _BAR.replace("{bar}", ""), "ncols": None}
        return disp_len(self._drawn(without_bar, count))

    def _drawn(self, values: Mapping[str, Any], count: int) -> str:
        """The text with the first `count` of the figures."""
        scaled = bool(self.unit_scale)
        shown: dict[str, Any] = dict(values)
        shown["postfix"] = "  ".join(self._figures[:count])
        shown["counted"] = _number(self.n, scaled=scaled)
        shown["counted_in_all"] = _number(self.total or 0, scaled=scaled)
        return str(self.format_meter(**shown))


def _number(value: float, *, scaled: bool) -> str:
    """A count as a whole number, or with an SI prefix: tqdm has `19.0` and `1.00` for 19 and 1."""
    if scaled and value >= 1000:
        return str(tqdm.format_sizeof(value))
    return f"{value:,.0f}"


class _LogLines:
    """A file for tqdm that logs each drawing as a record."""

    def write(self, drawing: str) -> None:
        line = drawing.strip()
        if line:
            _logger.info("%s", line)

    def flush(self) -> None:
        pass


def progress_bar(
    what: str,
    total: float,
    unit: str,
    *,
    done: float = 0,
    every_s: float | None = None,
    scaled: bool | None = None,
) -> ProgressBar:
    """A progress bar, for a `with`: `update` it by an increment, or `move_to` a total.

    On a terminal the bar appears after a second and disappears at the end. In a log it is a line
    every `every_s` seconds; by default the first comes after 5, and one more every 30.

    Args:
        done: how much was done earlier, which does not count for the speed.
        scaled: whether numbers from 1,000 on get SI prefixes; by default those of bytes and tokens.
    """
    if scaled is None:
        scaled = unit in ("B", " tokens")
    bar = partial(
        ProgressBar,
        total=total,
        initial=done,
        desc=what,
        unit=unit,
        unit_scale=scaled,
        miniters=0,
        leave=False,
    )
    if sys.stderr.isatty():
        return bar(
            file=sys.stderr,
            bar_format=_BAR,
            dynamic_ncols=True,
            delay=_BEFORE_THE_FIRST_S,
            mininterval=_BETWEEN_DRAWINGS_S,
        )
    if every_s is None:
        every_s = _BETWEEN_LOG_LINES_S
        # Sooner than the others: a stage whose parts take half a minute each would say nothing.
        first_s = min(_BEFORE_THE_FIRST_LOG_LINE_S, every_s)
    else:
        first_s = every_s
    lines = bar(
        file=cast("IO[str]", _LogLines()),
        delay=first_s,
        mininterval=every_s,
        bar_format=_LOG_LINE,
    )
    # tqdm draws when `mininterval` is over since the last drawing; it takes the start for one.
    lines.last_print_t -= every_s - first_s
    return lines


def counted(items: Iterable[_T], what: str, total: int, unit: str) -> Iterator[_T]:
    """Yields the `total` items of `items` and shows a progress bar."""
    with progress_bar(what, total, unit, scaled=False) as bar:
        for item in items:
            yield item
            bar.update()
