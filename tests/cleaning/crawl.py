"""A synthetic crawl of the shipped texts, of which it is known what is wrong with each document."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import zstandard

from pipeline.cleaning.clean import CleanedText
from pipeline.cleaning.stages import CleaningJob
from pipeline.config.data import Corpus
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from tests.texts import DATA

EDITS = (0, 1, 2, 5, 10)
"""Of near-copies: the percentage of words that is another's."""
_FILTERS = frozenset({"repetition", "quality", "lines"})
_DROPPED_BY = {
    "broken record": {"records"},
    "English": {"language"},
    "half English": {"language"},
    "one line, repeated": _FILTERS,
    "word salad of a shop": _FILTERS,
    "a few words": _FILTERS,
    "a price list": _FILTERS,
    "a menu of a page": _FILTERS,
    **{f"copy, {percent} % edited": {"duplicates"} for percent in EDITS},
    "near-copy of a held-out document": {"duplicates", "contamination"},
    "held-out sentence": {"contamination"},
    "benchmark question": {"contamination"},
}
_PERSONAL = ("kim.{0}@naver.com", "010-1234-{0}", "+82 10 9876 {0}", "02-345-{0}", "900101-123{0}")
_FRAMES = (
    "무단 전재 및 재배포 금지",
    "저작권자 ⓒ 무비뉴스",
    "Copyright 2024. All rights reserved.",
    "====----====",
)


def korean_pages(name: str, lines: int) -> Iterator[str]:
    """Pages of so many lines of the shipped Korean reviews."""
    for document in good_documents([str(DATA / "ko" / name)], Keys()):
        found = [
            line for line in document.text.split("\n") if len(line) > 15 and not line.endswith("..")
        ]
        yield from ("\n".join(found[at : at + lines]) for at in range(0, len(found) - lines, lines))


_Planted = tuple[str, str, str]
"""A kind, the text in the crawl, and the text that is kept."""


class Crawl:
    """`copies` documents of every kind of fault, and ten times as many without, in the folder
    `made`."""

    def __init__(self, made: Path, copies: int) -> None:
        self.made = made
        self.planted: dict[str, list[str]] = {}
        """the ids of the documents of each kind"""
        self.expected: dict[str, str] = {}
        """the text of those that are kept"""
        self._draw = random.Random(1)
        self._pages = korean_pages("reviews.jsonl.zst", 12)
        heldout = [*islice(self._pages, copies)]
        questions = [*islice(korean_pages("law.heldout.jsonl.zst", 3), copies)]
        english = [
            one.text
            for one in islice(
                good_documents([str(DATA / "en" / "stories.jsonl.zst")], Keys()), copies
            )
        ]
        made.mkdir()
        self._write("heldout.jsonl", [{"text": text} for text in heldout])
        self._write(
            "benchmark.jsonl",
            [{"question": text, "answer": at % 4} for at, text in enumerate(questions)],
        )
        documents = [("good", text, text) for text in islice(self._pages, 10 * copies)]
        for at in range(copies):
            documents += self._faulty(at, documents[at][1], heldout[at], questions[at], english[at])
        self._draw.shuffle(documents)
        later = [
            one for one in documents if one[0].startswith("copy")
        ]  # of copies the first is kept
        documents = [one for one in documents if not one[0].startswith("copy")] + later
        self.documents = documents
        half = len(documents) // 2
        for number, (encoding, part) in enumerate(
            (("utf-8", documents[:half]), ("cp949", documents[half:]))
        ):
            lines = []
            for at, (kind, text, kept) in enumerate(part):
                name = f"{number:05d}-000000-{at}"
                self.planted.setdefault(kind, []).append(name)
                if kind not in _DROPPED_BY:
                    self.expected[name] = kept
                line = json.dumps(
                    {"text": text}, ensure_ascii="�" in text or not _in(encoding, text)
                )
                lines.append(line[:-9] if kind == "broken record" else line)
            (made / f"crawl.{number}.{encoding}.jsonl").write_bytes(
                "".join(f"{line}\n" for line in lines).encode(encoding)
            )

    def _write(self, name: str, records: list[dict[str, object]]) -> None:
        (self.made / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def _faulty(
        self, at: int, copied: str, heldout: str, question: str, english: str
    ) -> Iterator[_Planted]:
        def page() -> str:
            return next(self._pages)

        def edited(text: str, percent: int) -> str:
            others = page().split()
            return "".join(
                self._draw.choice(others)
                if part.strip() and self._draw.random() * 100 < percent
                else part
                for part in re.split(r"(\s+)", text)
            )

        host = page()
        first = host.partition("\n")[0]
        yield "UTF-8 read as Latin-1", host.encode().decode("latin-1"), host
        if _in("cp949", other := page()):
            yield "CP949 read as Latin-1", other.encode("cp949").decode("latin-1"), other
        yield "broken record", page(), ""
        yield "English", english, ""
        yield "half English", f"{english}\n{first}", ""
        yield "one line, repeated", "\n".join([first] * 20), ""
        yield "word salad of a shop", "최저가 할인 쿠폰 지금 클릭 " * 30, ""
        yield "a few words", " ".join(host.split()[:20]), ""
        yield (
            "a price list",
            "\n".join(f"- {number}번 상품 {at}{number},900원" for number in range(40)),
            "",
        )
        yield "a menu of a page", "\n".join(re.findall("[가-힣]+", page())), ""
        for percent in EDITS:
            yield f"copy, {percent} % edited", edited(copied, percent), ""
        yield "near-copy of a held-out document", edited(heldout, 1), ""
        yield "held-out sentence", _hidden(page(), max(heldout.split("\n"), key=len)), ""
        yield "benchmark question", _hidden(page(), question), ""
        private, body = _PERSONAL[at % len(_PERSONAL)].format(1000 + at), page()
        replaced = ("email@example.com", *["010-0000-0000"] * 3, "000000-0000000")[
            at % len(_PERSONAL)
        ]
        yield (
            "personal data",
            f"{body}\n문의: {private} 로 연락 주세요.",
            f"{body}\n문의: {replaced} 로 연락 주세요.",
        )
        body = page()
        yield "boilerplate", f"{body}\n{_FRAMES[at % len(_FRAMES)]}", body

    @property
    def job(self) -> CleaningJob:
        """The job that cleans it."""
        settings = {"language": "ko", "benchmarks": [str(self.made / "benchmark.jsonl")]}
        corpus = Corpus.model_validate(
            {"input": [str(self.made / "crawl.*.jsonl")], "clean": settings}
        )
        heldout = corpus.model_copy(update={"input": [str(self.made / "heldout.jsonl")]})
        return CleaningJob(corpus, self.made / "cleaned", [heldout])

    def rows(self) -> dict[str, tuple[int, float, str]]:
        """By kind: how many were planted, the share of them treated as is right, and the steps that
        dropped them."""
        kept, dropped = _texts(self.made / "cleaned"), {}
        for step in (self.made / "cleaned" / "dropped").iterdir():
            dropped.update(dict.fromkeys(_texts(step), step.name))
        rows = {}
        for kind, names in self.planted.items():
            by = [dropped.get(name, "written" if name in kept else "records") for name in names]
            if kind in _DROPPED_BY:
                right = sum(step in _DROPPED_BY[kind] for step in by)
            else:
                right = sum(
                    kept.get(name, "").strip() == self.expected[name].strip() for name in names
                )
            rows[kind] = (len(names), right / len(names), ", ".join(sorted(set(by) - {"written"})))
        return rows

    def precision(self, cleaned: CleanedText) -> dict[str, tuple[int, float]]:
        """By step: how many it dropped, and the share of them that it should."""
        kind_of = {name: kind for kind, names in self.planted.items() for name in names}
        found = {}
        for step in sorted(
            (self.made / "cleaned" / "dropped").iterdir(),
            key=lambda step: [*cleaned.steps].index(step.name),
        ):
            kinds = [kind_of[name] for name in _texts(step)]
            found[step.name] = (
                len(kinds),
                sum(step.name in _DROPPED_BY.get(kind, ()) for kind in kinds) / len(kinds),
            )
        return found


def _in(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeError:
        return False
    return True


def _hidden(page: str, sentence: str) -> str:
    lines = page.split("\n")
    return "\n".join([*lines[:6], sentence, *lines[6:]])


def _texts(folder: Path) -> dict[str, str]:
    found = {}
    for shard in sorted(folder.glob("*.jsonl.zst")):
        with zstandard.open(shard, "rt", encoding="utf-8") as lines:
            found.update({record["id"]: record["text"] for record in map(json.loads, lines)})
    return found
