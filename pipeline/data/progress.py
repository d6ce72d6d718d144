"""How far a job is: bytes, documents and tokens a second, and when it will be done."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType

from tqdm import tqdm

from pipeline.data.unit_work import UnitRecord

_SECONDS_BETWEEN_LOG_LINES = 30.0


class Progress(AbstractContextManager["Progress"]):
    """A bar on a terminal; in a log file a line every half minute."""

    def __init__(self, total_bytes: int) -> None:
        interactive = sys.stderr.isatty()
        self._bar = tqdm(
            total=total_bytes,
            unit="B",
            unit_scale=True,
            desc="tokenizing",
            file=sys.stderr,
            dynamic_ncols=interactive,
            mininterval=0.2 if interactive else _SECONDS_BETWEEN_LOG_LINES,
        )
        self._documents = self._tokens = 0

    def start_at(self, done_bytes: int) -> None:
        """Says how much was done before, which does not count for the speed."""
        self._bar.initial = self._bar.n = done_bytes

    def add(self, text_bytes: int, record: UnitRecord) -> None:
        """Counts a finished unit."""
        self._documents += record.train.documents + record.heldout.documents
        self._tokens += record.train.tokens + record.heldout.tokens
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        rates = f"{self._documents / elapsed:,.0f} documents/s, {self._tokens / elapsed:,.0f} tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(text_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
