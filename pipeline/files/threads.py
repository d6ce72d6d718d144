"""Work on many files at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_THREADS = 8
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """`function` of each item, in order, several at a time; after an error no other is begun.

    It is for functions that open or hash files: a network file system makes the first wait, and
    the second releases Python's global lock.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        # After an error, `map` cancels the calls that have not begun.
        yield from pool.map(function, items)
