"""Units of work of a corpus folder, the records of finished ones, and where their files lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, NonNegativeInt

from pipeline.data.corpus.indexed_dataset import FileContent, ShardFile, shard_file
from pipeline.data.corpus.manifest import Counts

STATE = ".units"
"""The folder of unfinished work, in a corpus's own."""
QUARANTINE = "quarantine.jsonl"
"""The rejected records, in a corpus's folder."""
PLAN_FILE = "plan.json"
"""What a folder was begun for, in its folder of unfinished work."""
UNIT_IS_DONE_AGAIN = "its unit is done again"
"""The advice in errors about files of a finished unit."""


class UnitPart(Counts):
    """What one unit contributed to the train or to the held-out part.

    `files` are the contents of its shard's files, if it has documents.
    """

    files: dict[ShardFile, FileContent] = Field(default_factory=dict)


class UnitOutcome(BaseModel):
    """What is recorded of a finished unit, of any kind of work."""

    unit: str = ""
    """its name"""
    plan: str = ""
    """the hash of the plan.json that it was done for"""

    def written(self, state: Path, name: str) -> Iterator[tuple[Path, FileContent]]:
        """The files that the unit `name` wrote beside its record in `state`, and their contents."""
        yield from ()


class UnitRecord(UnitOutcome):
    """The outcome of a unit that writes tokens.

    `quarantine` is the content of its list of rejected records, `letters` of the hashes of its
    documents' letters, where there are any.
    """

    train: UnitPart
    heldout: UnitPart = UnitPart()
    rejected: dict[str, NonNegativeInt] = {}
    rejected_bytes: NonNegativeInt = 0
    quarantine: FileContent | None = None
    letters: FileContent | None = None

    def written(self, state: Path, name: str) -> Iterator[tuple[Path, FileContent]]:
        output = state.parent
        for folder, part in ((output, self.train), (heldout_of(output), self.heldout)):
            for end, content in part.files.items():
                yield shard_file(folder / name, end), content
        if self.quarantine is not None:
            yield quarantine_of(state, name), self.quarantine
        if self.letters is not None:
            yield letters_of(state, name), self.letters


def quarantine_of(state: Path, name: str) -> Path:
    """The list of the records that the unit `name` rejected."""
    return state / f"{name}.{QUARANTINE}"


def letters_of(state: Path, name: str) -> Path:
    """The hashes of the letters of the unit's training documents, by which copies are found."""
    return state / f"{name}.letters.npy"


@dataclass(frozen=True)
class WorkUnit:
    """A unit: its name, its size as the progress bar counts it, and the file that messages name."""

    name: str
    size: int
    path: str

    def __str__(self) -> str:
        return self.path


def heldout_of(output: Path) -> Path:
    """The folder of the held-out part of the corpus in `output`."""
    return output.with_name(output.name + ".heldout")
