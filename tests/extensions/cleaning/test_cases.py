"""What cleaning makes of single texts, of short copies, and of folders whose names are patterns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import zstandard

from pipeline.config.data import Corpus
from pipeline.data.tokenize.corpora import source_of
from pipeline.data.tokenize.input_files import input_files
from pipeline.extensions.cleaning.clean import clean, examples
from pipeline.extensions.cleaning.stages import CleaningJob
from pipeline.extensions.cleaning.text import (
    with_fixed_encoding,
    without_boilerplate_lines,
    without_personal,
)
from tests.data.helpers import write_jsonl

CASES = Path(__file__).parents[2] / "cases"
FILTERS = ["language", "boilerplate", "repetition", "quality", "lines", "personal_data"]


def job(folder: Path, source: Path, **settings: object) -> CleaningJob:
    corpus = {"input": [str(source)], "clean": {"language": "ko", "skip": FILTERS, **settings}}
    return CleaningJob(Corpus.model_validate(corpus), folder / "cleaned")


def written(folder: Path) -> list[str]:
    texts = []
    for shard in sorted((folder / "cleaned").glob("*.jsonl.zst")):
        with zstandard.open(shard, "rt", encoding="utf-8") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    return texts


def test_one_of_all_short_copies_is_kept(tmp_path: Path):
    source = CASES / "16_dedup" / "x.jsonl"
    given = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    clean(job(tmp_path, source), workers=1)
    assert sorted(written(tmp_path)) == sorted({*given})
    assert len(given) == 90


def test_a_page_with_a_short_question_of_a_benchmark_is_dropped(tmp_path: Path):
    source = CASES / "17_contamination"
    clean(job(tmp_path, source / "x.jsonl", benchmarks=[str(source / "bench.jsonl")]), workers=1)
    (kept,) = written(tmp_path)  # the others differ in a number alone
    assert kept.startswith("다른 이야기")


@pytest.mark.parametrize("name", ["plain", "[raw]", "a*b?{c}"])
def test_copies_and_benchmarks_are_found_whatever_the_folder_is_called(tmp_path: Path, name: str):
    folder = tmp_path / name
    folder.mkdir()
    for file in (CASES / "21_brackets").iterdir():
        shutil.copy(file, folder)
    wanted = job(folder, folder / "21_in.jsonl", benchmarks=[str(folder / "21_bench.jsonl")])
    clean(wanted, workers=1)
    assert len(written(folder)) == 2
    assert list(examples(wanted.output, 1))
    data = type("Data", (), {"corpora": {"cleaned": wanted.corpus}, "folder": folder})()
    wanted.output.rename(folder / "cleaned.clean")
    assert input_files(source_of(data, "cleaned").input)


def test_what_a_kill_at_the_end_left_is_removed(tmp_path: Path):
    wanted = job(tmp_path, write_jsonl(tmp_path / "x.jsonl", ["하나 둘 셋", "넷 다섯"]))
    first = clean(wanted, workers=1)
    (wanted.work / "logs").mkdir(parents=True)
    shutil.copy(wanted.output / "manifest.json", wanted.work / "plan.json")
    assert clean(wanted, workers=1) == first
    assert not wanted.work.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.01012345678", None),
        ("1.01012345678 배", None),
        ("버전 10.20.30.40", None),
        ("v2.4.118.3", None),
        ("제3.1.2.4항에 따라", None),
        ("3.1.2.4", None),
        ("1.2.3.4.5", None),
        ("ISBN 9788936434267", None),
        ("010–1234–5678", "010-0000-0000"),
        ("010—1234—5678", "010-0000-0000"),
        ("０１０－１２３４－５６７８", "010-0000-0000"),
        ("전화 02-123-4567, 031-234-5678", "전화 010-0000-0000, 010-0000-0000"),
        ("tel.010-1234-5678", "tel.010-0000-0000"),
        ("9001011234567", "000000-0000000"),
        ("９００１０１－１２３４５６７", "000000-0000000"),
        ("900101–1234567", "000000-0000000"),
        ("홍길동@회사.한국으로", "email@example.com으로"),
        ("kim@회사.한국", "email@example.com"),
        ("연락은kim@example.co.kr로", "연락은email@example.com로"),
        ("주소 211.45.27.198 에서", "주소 192.0.2.1 에서"),
        ("192.168.0.1", None),
    ],
)
def test_personal_data_and_what_only_looks_like_it(text: str, expected: str | None):
    assert without_personal(text) == (text if expected is None else expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Â£5", "£5"),
        ("Â£5 Â£6 Â£7 Â£8", "£5 £6 £7 £8"),
        ("café, déjà vu", "café, déjà vu"),
        ("이 문장은 한글이다".encode().decode("latin-1"), "이 문장은 한글이다"),
        ("이 문장은 한글이다".encode("cp949").decode("latin-1"), "이 문장은 한글이다"),
    ],
)
def test_text_that_was_decoded_wrongly_is_fixed_as_is_likelier(text: str, expected: str):
    assert with_fixed_encoding(text) == expected


@pytest.mark.parametrize(
    ("line", "is_kept"),
    [
        ("무단 전재 및 재배포 금지", False),
        ("저작권자 ⓒ 무비뉴스", False),
        ("본 기사는 무단 전재 및 재배포를 금지합니다.", False),
        ("Copyright 2024. All rights reserved.", False),
        ("We use cookies. See our privacy policy.", False),
        ("이 기사는 무단 전재 금지 조항을 다룬다.", True),
        ("그는 무단 복제 혐의로 신문사를 고소했다.", True),
        ("The court ruled that the privacy policy of the company misled its users.", True),
    ],
)
def test_a_line_of_boilerplate_goes_and_a_sentence_about_it_stays(line: str, is_kept: bool):
    text = f"앞 문장이다.\n{line}\n뒤 문장이다."
    assert without_boilerplate_lines(text) == (text if is_kept else "앞 문장이다.\n뒤 문장이다.")
