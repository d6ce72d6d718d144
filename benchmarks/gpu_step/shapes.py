"""The bases and batches on which a step is timed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import BASES, STORIES


class Shape(NamedTuple):
    """The sizes of a measured step.

    Attributes:
        architecture: the config.json of the base. No weights are read.
        batch_size: rows of the micro-batch.
        sequence_length: tokens of a row.
        l_fp: the layers from this one on have W12; those below are preservation layers.
        documents: the fewest and the most tokens of a document; None: each row is one document.
    """

    architecture: Path
    batch_size: int
    sequence_length: int
    l_fp: int
    documents: tuple[int, int] | None = None

    @property
    def document_lengths(self) -> list[list[int]]:
        """The lengths of the documents of each row: evenly distributed, and the same each time. The
        last one of a row is cut at its end."""
        if self.documents is None:
            return [[self.sequence_length]] * self.batch_size
        lengths = random.Random(0)
        rows: list[list[int]] = []
        for _ in range(self.batch_size):
            row: list[int] = []
            while sum(row) < self.sequence_length:
                row.append(min(lengths.randint(*self.documents), self.sequence_length - sum(row)))
            rows.append(row)
        return rows

    @property
    def share_of_pairs(self) -> float:
        """How many pairs of tokens attend to each other, over those of whole rows."""
        pairs = sum(length**2 for row in self.document_lengths for length in row)
        return pairs / (self.batch_size * self.sequence_length**2)


_DOCUMENTS = (500, 1000)
"""Tokens of a document of the web: rows of one document overstate attention's share of a step."""

# The two shapes of the 1B have equally many tokens, so they differ in attention's share of the work
# alone. On a GPU `l_fp` is a fifth of the layers, as in the paper (3 of 16); on a CPU half of them.
SHAPES = {
    "1b-8192": Shape(BASES / "llama-3.2-1b.json", 2, 8192, 3),
    "1b-8192-packed": Shape(BASES / "llama-3.2-1b.json", 2, 8192, 3, _DOCUMENTS),
    "1b-4096": Shape(BASES / "llama-3.2-1b.json", 4, 4096, 3),
    "8b-4096": Shape(BASES / "llama-3.1-8b.json", 1, 4096, 6),
    "102m": Shape(BASES / "llama-102m.json", 4, 256, 6),
    # 64 experts, of which a token takes 8.
    "moe-96m": Shape(BASES / "qwen3-moe-96m.json", 4, 256, 3),
}
ON_A_GPU = ("1b-8192", "1b-8192-packed", "1b-4096", "8b-4096")
# Small enough for two cores, and wide enough that matrix products take most of a step.
ON_A_CPU = ("102m", "moe-96m")
TINY = Shape(STORIES / "config.json", 1, 16, 2)
"""What --tiny measures instead of each shape: it shows that every variant runs, and no times."""
TINY_PACKED = TINY._replace(documents=(3, 6))
