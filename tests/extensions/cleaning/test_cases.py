"""What cleaning makes of single texts, of short copies, and of folders whose names are patterns."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config.data import Corpus
from pipeline.data.tokenize.corpora import source_of
from pipeline.data.tokenize.input_files import input_files
from pipeline.errors import DataError
from pipeline.extensions.cleaning import clean as module
from pipeline.extensions.cleaning.clean import clean, examples
from pipeline.extensions.cleaning.personal_data import without_personal
from pipeline.extensions.cleaning.stages import CleaningJob
from pipeline.extensions.cleaning.text import with_fixed_encoding, without_boilerplate_lines
from tests.data.helpers import documents, write_jsonl

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
        ("9001011234568", "000000-0000000"),
        ("9001011234567", None),
        ("바코드 8801043015653 신라면", None),
        ("상품코드 8801121234567", None),
        ("타임스탬프 1701012345678", None),
        ("주문번호 20231231-1234567", None),
        ("운송장 240101-1234567", None),
        ("240101-1234567", None),
        ("법인등록번호 110111-1234567", None),
        ("법인 131111-1234567", None),
        ("본점 950111-1234563", None),
        ("900230-1234567", None),
        ("900101\n-1234567", None),
        ("https://ex.com/item/8801043015653", None),
        ("고객 900101-1234567입니다", "고객 000000-0000000입니다"),
        ("고객 900101-5234561입니다", "고객 000000-0000000입니다"),
        ("고객 211015-3123456입니다", "고객 000000-0000000입니다"),
        ("주민등록번호: 240101-1234567", "주민등록번호: 000000-0000000"),
        ("외국인등록번호 2401011234567", "외국인등록번호 000000-0000000"),
        ("전화 (010) 1234-5678", "전화 010-0000-0000"),
        ("전화 (010)12345678", "전화 010-0000-0000"),
        ("전화（０１０）１２３４－５６７８", "전화010-0000-0000"),
        ("전화(010-1234-5678)", "전화(010-0000-0000)"),
        ("(02) 123-4567, (031)123-4567", "010-0000-0000, 010-0000-0000"),
        ("02)123-4567", "010-0000-0000"),
        ("+82 (0)10-1234-5678", "010-0000-0000"),
        ("(+82) 10-1234-5678", "010-0000-0000"),
        ("DOI 10.1000/010-1234-5678", None),
        ("A4-010-1234-5678", None),
        ("고시 제01012345678호", None),
        ("01012345678호출", "010-0000-0000호출"),
        ("icon@2x.png, photo@3x.jpg, a@1.5x.webp", None),
        ("logo@2x.zip", None),
        ("foo@bar.JPG", None),
        ("git@github.com:org/repo", None),
        ("kim@2x.co.kr", "email@example.com"),
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


NFD = ("36_benchmark_nfd", "benchmark.jsonl")
TABS = ("37_benchmark_tabs", "benchmark.jsonl")
CRLF = ("37_benchmark_tabs", "benchmark_crlf.jsonl")


@pytest.mark.parametrize(("case", "benchmark"), [NFD, TABS, CRLF])
@pytest.mark.parametrize("skipped", ["fix_encoding", "lines"])
def test_a_benchmark_is_found_however_it_is_spelled(
    tmp_path: Path, case: str, benchmark: str, skipped: str
):
    folder = CASES / case
    pages = folder / "pages.jsonl"
    if skipped == "fix_encoding":
        # The page is decomposed, too, and nothing composes it.
        texts = [json.loads(line)["text"] for line in pages.read_text().splitlines()]
        pages = write_jsonl(
            tmp_path / "x.jsonl", [unicodedata.normalize("NFD", text) for text in texts]
        )
    skip = [*FILTERS, "duplicates", skipped]
    clean(job(tmp_path, pages, benchmarks=[str(folder / benchmark)], skip=skip), workers=1)
    assert len(written(tmp_path)) == 19


@pytest.mark.parametrize("name", ["x.tsv", "x.csv", "x.parquet", "x.arrow", "x.json", "x.tsv.gz"])
def test_benchmarks_are_read_in_the_formats_of_texts(tmp_path: Path, name: str):
    line = (CASES / "37_benchmark_tabs" / "benchmark_crlf.jsonl").read_text()
    question = " ".join(json.loads(line)["question"].split())
    rows = [{"id": "1", "question": f'"{question}'}, {"id": "2", "question": "짧다"}]
    path = tmp_path / name
    table = pa.Table.from_pylist(rows)
    if name.endswith(".parquet"):
        pq.write_table(table, path)
    elif name.endswith(".arrow"):
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as to:
            to.write_table(table)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif name.endswith(".csv"):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["id", "question"], *(row.values() for row in rows)])
    else:
        # A stray quotation mark is an ordinary character there.
        text = "".join(f"{row['id']}\t{row['question']}\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    pages = CASES / "37_benchmark_tabs" / "pages.jsonl"
    skip = [*FILTERS, "duplicates"]
    clean(job(tmp_path, pages, benchmarks=[str(path)], skip=skip), workers=1)
    assert len(written(tmp_path)) == 19


def test_a_benchmark_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text("no JSON\n")
    pages = CASES / "37_benchmark_tabs" / "pages.jsonl"
    with pytest.raises(DataError, match=r"x\.jsonl: a benchmark is JSONL, CSV, TSV or Parquet"):
        clean(job(tmp_path, pages, benchmarks=[str(tmp_path / "x.jsonl")]), workers=1)


def test_cleaning_ends_where_an_input_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of equal size; also where it goes on, and where all is done."""
    source = write_jsonl(tmp_path / "x.jsonl", documents(30))
    wanted = job(tmp_path, source)
    given = source.read_bytes()

    def change() -> None:
        source.write_bytes(given.replace(b"Tom", b"Tim"))

    run = module._run

    def changed(*arguments: Any) -> None:
        change()
        run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_run", changed)
        with pytest.raises(DataError, match=r"x\.jsonl: changed during the work"):
            clean(wanted, workers=1)
    assert not wanted.output.exists()
    with pytest.raises(DataError, match=r"was made with other inputs: .*x\.jsonl: changed"):
        clean(wanted, workers=1)
    source.write_bytes(given)
    clean(wanted, workers=1)
    change()
    with pytest.raises(DataError, match=r"was made with other inputs: .*x\.jsonl: changed"):
        clean(wanted, workers=1)


def test_a_benchmark_that_changes_during_the_cleaning_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pages = CASES / "37_benchmark_tabs" / "pages.jsonl"
    benchmark = tmp_path / "b.jsonl"
    shutil.copy(CASES / "37_benchmark_tabs" / "benchmark.jsonl", benchmark)
    run = module._run

    def changed(cleaning: CleaningJob, stage: Any, workers: int) -> None:
        run(cleaning, stage, workers)
        if stage.name == "words":
            benchmark.write_bytes(benchmark.read_bytes().replace(b"question", b"Question"))

    monkeypatch.setattr(module, "_run", changed)
    with pytest.raises(DataError, match=r"b\.jsonl: changed during the work"):
        clean(job(tmp_path, pages, benchmarks=[str(benchmark)]), workers=1)


def test_files_whose_text_is_lost_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """One record of many, but most of the text."""
    huge = write_jsonl(tmp_path / "huge.jsonl", ["영화 " * 5_000_000])
    source = write_jsonl(tmp_path / "x.jsonl", documents(200))
    both = job(tmp_path, source)
    both.corpus.input.append(str(huge))
    clean(both, workers=1)
    size = len(("영화 " * 5_000_000).encode())
    assert f"{huge}: {huge.stat().st_size - 1} bytes of text are in records" in caplog.text
    assert huge.stat().st_size > size > 2**25
    assert f"{source}: " not in caplog.text
