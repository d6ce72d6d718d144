"""Web archives: the main text of each page in its encoding; damaged ones; foreign files."""

from __future__ import annotations

import gzip
import sys
from io import BytesIO
from pathlib import Path

import pytest
import zstandard
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from pipeline.data.records import Keys, Rejected
from pipeline.data.text_streams import text_length
from pipeline.data.units import sampled_documents, split_file
from pipeline.errors import DataError, MissingPackageError
from tests.data.helpers import read, texts_of

TEXTS = [
    "\n".join(f"{page}번째 글의 {line}번째 문단입니다. 오늘은 날씨가 좋아서 오랫동안 산책을 갔다." for line in range(9))
    for page in range(4)
]
PAGE = "<html><head>{}<title>제목</title></head><body><nav><a>메뉴</a></nav><article>{}</article></body></html>"


def html(text: str, head: str = "") -> str:
    return PAGE.format(head, "".join(f"<p>{line}</p>" for line in text.split("\n")))


def archive(path: Path, pages: list[tuple[str, bytes]], kind: str = "response") -> Path:
    """A web archive with a page, or a text, for each content type and content."""
    written = BytesIO()
    writer = WARCWriter(written, gzip=path.suffix == ".gz")
    writer.write_record(writer.create_warcinfo_record(path.name, {"software": "test"}))
    for content_type, content in pages:
        headers = StatusAndHeaders("200 OK", [("Content-Type", content_type)], protocol="HTTP/1.1")
        given = {"http_headers": headers} if kind == "response" else {"warc_content_type": content_type}
        writer.write_record(writer.create_warc_record("http://a.test", kind, payload=BytesIO(content), **given))
    data = written.getvalue()
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    return path


@pytest.mark.parametrize("name", ["x.warc", "x.warc.gz", "x.warc.zst"])
def test_pages_are_read_in_their_encoding_without_menus(tmp_path: Path, name: str) -> None:
    declared = html(TEXTS[2], '<meta charset="EUC-KR">')
    pages = [
        ("text/html", html(TEXTS[0]).encode()),
        ("image/png", b"\x89PNG"),
        ("text/html; charset=euc-kr", html(TEXTS[1]).encode("cp949")),
        ("text/html", declared.encode("cp949")),
        ("application/xhtml+xml; charset=no-such", html(TEXTS[3]).encode("cp949")),
    ]
    path = archive(tmp_path / name, pages)
    assert texts_of(path) == TEXTS
    assert len(split_file(path, 0, Keys(), unit_bytes=100)) == 1
    documents, scale = sampled_documents([str(path)], Keys(), 2**20)
    assert ([document.text for document in documents], scale) == (TEXTS, 1)


def test_a_sample_of_an_archive_says_how_much_the_whole_holds(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.warc.gz", [("text/html", html(TEXTS[0]).encode())] * 40)
    documents, scale = sampled_documents([str(path)], Keys(), text_length(path) // 4)
    assert len(documents) * scale == pytest.approx(40, rel=0.1)
    assert scale > 2


def test_texts_of_a_wet_file_are_read_as_they_are(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.warc.wet.gz", [("text/plain", text.encode()) for text in TEXTS], "conversion")
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize("name", ["x.warc", "x.warc.gz"])
def test_a_cut_archive_is_read_up_to_the_cut(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / name, [("text/html", html(text).encode()) for text in TEXTS])
    path.write_bytes(path.read_bytes()[:-200])
    records = read(path)
    assert [record.text for record in records[:-1]] == TEXTS[:-1]
    assert isinstance(records[-1], Rejected)
    assert records[-1].reason == "truncated_file"


@pytest.mark.parametrize("content", [b'{"text": "no archive"}\n', b"WARC/1.0\r\nContent-Length: many\r\n\r\nx\r\n\r\n"])
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.warc.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"x\.warc\.gz: (not a web archive, or a damaged one|.*no usable document)"):
        sampled_documents([str(path)], Keys(), 2**20)


@pytest.mark.parametrize("keys", [Keys(encoding="cp949"), Keys(prompt="question"), Keys(document="file")])
def test_settings_of_other_formats_are_refused(tmp_path: Path, keys: Keys) -> None:
    with pytest.raises(DataError, match=r"x\.warc: "):
        split_file(archive(tmp_path / "x.warc", []), 0, keys, 100)


def test_without_the_extra_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'scale-cpt\[clean\]'"):
        read(archive(tmp_path / "x.warc", []))
