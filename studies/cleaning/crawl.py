"""A synthetic crawl of the shipped texts, of which it is known what is wrong with each document."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import zstandard

from pipeline.config.data import Corpus
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.extensions.cleaning.clean import CleanedText
from pipeline.extensions.cleaning.stages import CleaningJob

DATA = Path(__file__).parents[2] / "examples" / "data"

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
_PERSONAL = (
    ("kim.{0}@naver.com", "email@example.com"),
    ("010-1234-{0}", "010-0000-0000"),
    ("+82 10 9876 {0}", "010-0000-0000"),
    ("02-345-{0}", "010-0000-0000"),
    ("900101-123{0}", "000000-0000000"),
)
"""An address, telephone numbers and a registration number, and what cleaning writes instead."""
_FRAMES = (
    "무단 전재 및 재배포 금지",
    "저작권자 ⓒ 무비뉴스",
    "Copyright 2024. All rights reserved.",
    "====----====",
)


def korean_pages(name: str, lines: int) -> Iterator[str]:
    """Pages of so many lines of the shipped Korean reviews."""
    for document in good_documents([str(DATA / "ko" / name)], Keys()):
        found = []
        for line in document.text.split("\n"):
            # Neither short nor cut off by an ellipsis: such lines would be a fault that is not
            # planted.
            if len(line) > 15 and not line.endswith(".."):
                found.append(line)
        for start in range(0, len(found) - lines, lines):
            yield "\n".join(found[start : start + lines])


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
        stories = good_documents([str(DATA / "en" / "stories.jsonl.zst")], Keys())
        english = [story.text for story in islice(stories, copies)]
        made.mkdir()
        self._write("heldout.jsonl", [{"text": text} for text in heldout])
        benchmark = []
        for number, question in enumerate(questions):
            benchmark.append({"question": question, "answer": number % 4})
        self._write("benchmark.jsonl", benchmark)

        self.documents = self._all_documents(copies, heldout, questions, english)
        half = len(self.documents) // 2
        self._write_crawl(0, "utf-8", self.documents[:half])
        self._write_crawl(1, "cp949", self.documents[half:])

    def _all_documents(
        self, copies: int, heldout: list[str], questions: list[str], english: list[str]
    ) -> list[_Planted]:
        """Documents with and without faults, shuffled; copies after what they copy."""
        documents = [("good", text, text) for text in islice(self._pages, 10 * copies)]
        for at in range(copies):
            documents += self._faulty(at, documents[at][1], heldout[at], questions[at], english[at])
        self._draw.shuffle(documents)
        originals: list[_Planted] = []
        copied: list[_Planted] = []
        for document in documents:
            if document[0].startswith("copy"):
                copied.append(document)
            else:
                originals.append(document)
        # Of several copies the first is kept: the original must come before its near-copies.
        return originals + copied

    def _write_crawl(self, number: int, encoding: str, documents: list[_Planted]) -> None:
        """Writes a file of the crawl, and notes what it has of each kind."""
        lines = []
        for at, (kind, text, kept) in enumerate(documents):
            # The id that cleaning gives a document: the file's number, and its place in the file.
            name = f"{number:05d}-000000-{at}"
            self.planted.setdefault(kind, []).append(name)
            if kind not in _DROPPED_BY:
                self.expected[name] = kept
            is_escaped = "�" in text or not _in(encoding, text)
            line = json.dumps({"text": text}, ensure_ascii=is_escaped)
            if kind == "broken record":
                line = line[:-9]
            lines.append(f"{line}\n")
        file = self.made / f"crawl.{number}.{encoding}.jsonl"
        file.write_bytes("".join(lines).encode(encoding))

    def _write(self, name: str, records: list[dict[str, object]]) -> None:
        (self.made / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def _faulty(
        self, at: int, copied: str, heldout: str, question: str, english: str
    ) -> Iterator[_Planted]:
        def page() -> str:
            return next(self._pages)

        def edited(text: str, percent: int) -> str:
            others = page().split()
            parts = []
            for part in re.split(r"(\s+)", text):
                is_word = part.strip() != ""
                if is_word and self._draw.random() * 100 < percent:
                    part = self._draw.choice(others)
                parts.append(part)
            return "".join(parts)

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
        private, replaced = _PERSONAL[at % len(_PERSONAL)]
        private = private.format(1000 + at)
        body = page()
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
        kept = _texts(self.made / "cleaned")
        dropped_by: dict[str, str] = {}
        for step in (self.made / "cleaned" / "dropped").iterdir():
            dropped_by.update(dict.fromkeys(_texts(step), step.name))
        rows = {}
        for kind, names in self.planted.items():
            right = 0
            steps = set()
            for name in names:
                # A record that cannot be read is neither kept nor dropped by a step.
                step_name = dropped_by.get(name, "records")
                if name not in dropped_by and name in kept:
                    step_name = "written"
                steps.add(step_name)
                if kind in _DROPPED_BY:
                    right += step_name in _DROPPED_BY[kind]
                else:
                    right += kept.get(name, "").strip() == self.expected[name].strip()
            dropping_steps = ", ".join(sorted(steps - {"written"}))
            rows[kind] = (len(names), right / len(names), dropping_steps)
        return rows

    def precision(self, cleaned: CleanedText) -> dict[str, tuple[int, float]]:
        """By step: how many it dropped, and the share of them that it should."""
        kind_of: dict[str, str] = {}
        for kind, names in self.planted.items():
            kind_of.update(dict.fromkeys(names, kind))
        in_order = [*cleaned.steps]
        folders = (self.made / "cleaned" / "dropped").iterdir()
        found = {}
        for step in sorted(folders, key=lambda folder: in_order.index(folder.name)):
            dropped = _texts(step)
            right = 0
            for name in dropped:
                right += step.name in _DROPPED_BY.get(kind_of[name], ())
            found[step.name] = (len(dropped), right / len(dropped))
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
            for line in lines:
                record = json.loads(line)
                found[record["id"]] = record["text"]
    return found
