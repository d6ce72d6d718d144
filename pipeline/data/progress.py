"""How far a job is: bytes, documents and tokens a second, and when it will be done."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from pipeline.data.unit_work import UnitRecord
from pipeline.progress_bar import progress_bar


class Progress(AbstractContextManager["Progress"]):
    """The bytes of text that are done, with the speed in documents and tokens."""

    def __init__(self, total_bytes: int) -> None:
        self._bar = progress_bar("tokenizing", total_bytes, "B")
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
