"""A gate for Korean on a real base, SmolLM2-135M: it stays closed on all that is not Korean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.extensions.gate.documents import Packer, Piece
from pipeline.extensions.gate.fitting import BaseStream, fit_on
from pipeline.extensions.gate.fitting_text import FittingText
from pipeline.extensions.gate.kinds import SHIPPED, kind_windows, read_kinds
from pipeline.extensions.gate.windows import NO_KIND, joined
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base
from tests.texts import DATA, REVIEWS, REVIEWS_HELDOUT

SMOLLM2 = Path(__file__).parents[3] / "runs" / "bases" / "smollm2-135m"
BOOKS = DATA / "en" / "gutenberg.heldout.jsonl.zst"
SENTENCES = Path(__file__).with_name("other_languages.jsonl")
TOKENS = 12_000
LENGTH = 256
FIRST_TOKENS = 4

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2}: make smollm2 makes it"),
]


def pieces(path: Path, *, first: int, count: int) -> Iterator[str]:
    """Beginnings of the documents of a file."""
    for document in islice(good_documents([str(path)], Keys("text")), first, first + count):
        yield document.text[:700]


class Base:
    """The base up to the gate's layer, and what makes windows of texts."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(SMOLLM2)
        self.packer = Packer(self.tokenizer, LENGTH, document_mask=True)
        base = open_base(SMOLLM2)
        decoder = Decoder(base.spec).eval().requires_grad_(False)
        load_base(decoder, base)
        self.stream = BaseStream(decoder, 2)

    def windows(self, texts: Iterator[str], *, is_new: bool, kind: int = NO_KIND):
        documents = [[Piece(ids_of(self.tokenizer, text), kind, is_new)] for text in texts]
        found = self.packer.windows(documents)
        assert found is not None
        return found.rows(slice(0, TOKENS // LENGTH))

    def corpora(self, first: int) -> list:
        return [
            self.windows(pieces(REVIEWS, first=first, count=80), is_new=True),
            self.windows(pieces(BOOKS, first=first, count=80), is_new=False),
        ]


def open_positions(base: Base, text: FittingText) -> dict[str, tuple[int, int]]:
    """The open tokens and all tokens of each kind of sentences, at a threshold that closes 1 % of
    held-out Korean behind the first tokens."""
    fit = fit_on(base.stream, text, "token+running_mean")
    heldout = base.windows(pieces(REVIEWS_HELDOUT, first=0, count=60), is_new=True)
    is_later = heldout.present & (heldout.positions >= FIRST_TOKENS)
    threshold = float(base.stream.scores(heldout, fit.gate)[is_later].quantile(0.01))
    sentences = [json.loads(line) for line in SENTENCES.open(encoding="utf-8")]
    names = sorted({sentence["kind"] for sentence in sentences})
    documents = []
    for sentence in sentences:
        ids = ids_of(base.tokenizer, sentence["text"])
        documents.append([Piece(ids, names.index(sentence["kind"]))])
    windows = base.packer.windows(documents)
    assert windows is not None
    is_open = base.stream.scores(windows, fit.gate) > threshold
    found: dict[str, tuple[int, int]] = {}
    for number, name in enumerate(names):
        is_kind = windows.present & (windows.kinds == number)
        is_kind &= windows.positions >= FIRST_TOKENS
        found[name] = int((is_open & is_kind).sum()), int(is_kind.sum())
    return found


def test_it_stays_closed_on_all_that_is_not_korean_only_by_the_kinds_of_text():
    base = Base()
    corpora = FittingText(joined(base.corpora(0)), joined(base.corpora(80)))
    kinds = kind_windows(
        read_kinds(SHIPPED),
        base.tokenizer,
        tokens=2 * TOKENS,
        sequence_length=LENGTH,
        document_mask=True,
        seed=0,
    )
    to_fit, to_test = kinds.parts
    assert to_fit is not None and to_test is not None
    with_kinds = FittingText(
        joined([corpora.fit, to_fit]), joined([corpora.unused, to_test]), kinds.names
    )
    found = open_positions(base, with_kinds)
    opened, korean = found.pop("ko")
    assert opened >= 0.95 * korean
    others = [sum(counts) for counts in zip(*found.values(), strict=True)]
    assert others[1] > 700 and others[0] <= 2

    alone = open_positions(base, corpora)
    alone.pop("ko")
    assert sum(opened for opened, _ in alone.values()) > 100
