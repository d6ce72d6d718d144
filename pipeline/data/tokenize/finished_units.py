"""The units of a job that are finished: what they hold together, and when to stop the job."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from pipeline.data.corpus.manifest import Counts
from pipeline.data.sources.object_stores import input_path
from pipeline.data.sources.records import MAX_RECORD_BYTES
from pipeline.data.sources.streams import encoding_advice
from pipeline.data.tokenize.corpora import Job
from pipeline.data.tokenize.unit_records import QUARANTINE, UnitRecord, quarantine_of
from pipeline.data.tokenize.units import Unit
from pipeline.errors import DataError
from pipeline.files.publishing import published_file


class FinishedUnits:
    """The records of the units that are finished, and what they hold together."""

    def __init__(self, job: Job, state: Path, max_bad_fraction: float) -> None:
        self.records: dict[str, UnitRecord] = {}
        self.rejected: Counter[str] = Counter()
        self.total = 0
        """how many records were read, rejected ones included"""
        self.rejected_bytes = 0
        """bytes of text in rejected records"""
        self._counts = Counts()
        self._job = job
        self._state = state
        self._max_bad_fraction = max_bad_fraction

    def add(self, name: str, record: UnitRecord) -> None:
        self.records[name] = record
        self.rejected.update(record.rejected)
        self.total += sum(record.rejected.values())
        self.rejected_bytes += record.rejected_bytes
        for part in (record.train, record.heldout):
            self.total += part.documents
            self._counts.bytes += part.bytes
            self._counts.tokens += part.tokens
            self._counts.characters += part.characters
            self._counts.unknown_tokens += part.unknown_tokens
            self._counts.lost_characters += part.lost_characters

    def check(self) -> None:
        """Compares the fractions of rejected records, by their number and by their bytes, and of
        unknown text with what is allowed.

        Raises:
            DataError: one of them is larger.
        """
        if self.rejected.total() > self._max_bad_fraction * self.total:
            raise self._too_many_rejected(
                f"{self.rejected.total()} of {self.total} records are bad"
            )
        size = self.rejected_bytes + self._counts.bytes
        if self.rejected_bytes > self._max_bad_fraction * size:
            share = self.rejected_bytes / size
            raise self._too_many_rejected(
                f"{self.rejected_bytes:,} of {size:,} bytes of text ({share:.1%}) are in the "
                f"{self.rejected.total()} bad of {self.total} records"
            )
        if self._counts.unknown_fraction > self._job.corpus.max_unknown_fraction:
            raise self._too_many_unknown()

    def check_has_documents(self) -> None:
        """Makes sure that there is something to train on.

        Raises:
            DataError: no unit has a training document.
        """
        if not any(record.train.documents for record in self.records.values()):
            named = ", ".join(self._job.corpus.input)
            raise DataError(
                f"{named}: no usable document in {self.total} records: {dict(self.rejected)}"
            )

    def training_shards(self, units: Sequence[Unit]) -> dict[Path, str]:
        """The training shards, each with the input file that its documents come from."""
        shards: dict[Path, str] = {}
        for unit in units:
            if self.records[unit.name].train.documents:
                shards[self._job.output / unit.name] = unit.path
        return shards

    def publish_quarantine(self, units: Sequence[Unit]) -> None:
        """Joins the units' lists of rejected records, in the order of the input."""
        with published_file(self._job.output / QUARANTINE, self._state) as whole:
            for unit in units:
                if self.records[unit.name].rejected:
                    whole.write(quarantine_of(self._state, unit.name).read_bytes())

    def largest_rejected(self) -> list[dict[str, Any]]:
        """Three rejected records as the quarantine lists them, those that lose the most text."""
        return heapq.nlargest(3, self._quarantined(), key=_lost_bytes)

    def _too_many_rejected(self, what: str) -> DataError:
        """The error about too many rejected records, with three examples."""
        examples = self.largest_rejected()
        shown = "; ".join(map(shown_example, examples))
        advice = encoding_advice(input_path(example["file"]) for example in examples)
        if advice is None and examples and examples[0]["reason"] == "too_large":
            advice = (
                f"split records of more than {MAX_RECORD_BYTES >> 20} MiB, and remove the output "
                "folder; or raise --max-bad-fraction and start again: finished work is kept"
            )
        if advice is None:
            advice = (
                "set text_key (--text-key), prompt_key, or for chats messages_key, or correct the "
                "input, and remove the output folder; or raise --max-bad-fraction and start again: "
                "finished work is kept"
            )
        return DataError(
            f"{what}, more than --max-bad-fraction {self._max_bad_fraction} allows: {shown}; "
            f"{advice}"
        )

    def _quarantined(self) -> Iterator[dict[str, Any]]:
        """The rejected records that the finished units have listed."""
        for name, record in self.records.items():
            if record.rejected:
                for line in quarantine_of(self._state, name).read_bytes().splitlines():
                    yield orjson.loads(line)

    def _too_many_unknown(self) -> DataError:
        """The error about more text that the tokenizer cannot spell than the corpus allows."""
        counts = self._counts
        corpus = self._job.corpus
        if counts.lost_characters:
            lost = f"{counts.lost_characters:,} of {counts.characters:,} characters become nothing"
        else:
            lost = f"{counts.unknown_tokens:,} of {counts.tokens:,} tokens are unknown"
        return DataError(
            f"{self._job.tokenizer}: cannot spell the text of {', '.join(corpus.input)}: {lost}, "
            f"more than max_unknown_fraction {corpus.max_unknown_fraction} allows; take a "
            "tokenizer that has the language, or raise it (--max-unknown-fraction)"
        )


def _lost_bytes(rejected: dict[str, Any]) -> int:
    return int(rejected.get("size", 0))


def shown_example(rejected: dict[str, Any]) -> str:
    """A line of a quarantine, for a message."""
    excerpt = rejected["excerpt"][:60]
    shown = f"{rejected['file']} at {rejected['offset']}: {rejected['reason']} {excerpt!r}"
    if "detail" in rejected:
        shown = f"{shown} ({rejected['detail'][:120]})"
    return shown
