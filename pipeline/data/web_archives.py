"""The pages of a web archive (WARC) as text, without menus and frames; the texts of a WET file as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pipeline.data.records import EXCERPT_BYTES, MAX_RECORD_BYTES, Record, Rejected, record_of
from pipeline.data.text_streams import Stream
from pipeline.errors import DataError, MissingPackageError, faults_of_library

_HEAD_BYTES = 2048
"""Within which a page names its encoding."""
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)
_WIDER = {"euc-kr": "cp949", "ks_c_5601-1987": "cp949"}
"""What browsers read in place of an encoding."""


class _File:
    """A stream as warcio reads it."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._offset = stream, 0

    def read(self, size: int) -> bytes:
        block = self._stream.read_at(self._offset, size)
        self._offset += len(block)
        return block

    def tell(self) -> int:
        return self._offset


def archive_records(stream: Stream) -> Iterator[Record]:
    """The pages of an archive: HTML that a server answered, or text that was made of it. Others are passed over.

    Where the archive is damaged, the rest of it is rejected with the fault as reason.

    Raises:
        DataError: it is no archive.
        MissingPackageError: the packages that read it are not installed.
    """
    try:
        from trafilatura import extract
        from warcio.archiveiterator import ArchiveIterator
    except ModuleNotFoundError as error:
        advice = f"{error.name} is not installed; pip install 'scale-cpt[clean]'"
        raise MissingPackageError(f"{stream.path}: {advice}") from None
    with faults_of_library(f"{stream.path}: not a web archive, or a damaged one", DataError):
        archive, is_cut = ArchiveIterator(_File(stream)), False
        for found in archive:
            kind, offset = _content_type(found), archive.offset
            if kind is None:
                continue
            content = found.content_stream().read(MAX_RECORD_BYTES + 1)
            if len(content) > MAX_RECORD_BYTES:
                yield Rejected(offset, "too_large", content[:EXCERPT_BYTES])
            elif is_cut := bool(found.raw_stream.limit):
                break
            elif "html" not in kind:
                yield record_of(offset, content)._replace(offset=offset)
            else:
                # deduplicate would leave out what this process has read in other files.
                text = extract(_page(content, kind), favor_precision=True, include_comments=False, deduplicate=False)
                yield record_of(offset, text or "")._replace(offset=offset)
        if is_cut or stream.fault:
            yield Rejected(archive.offset, stream.fault or "truncated_file", b"")


def _content_type(found: Any) -> str | None:  # noqa: ANN401  # warcio has no types
    """The content type of a record that is a page, or text of one; None for any other."""
    if found.rec_type == "conversion":
        return "text/plain"
    if found.rec_type != "response" or found.http_headers is None:
        return None
    identified = found.rec_headers.get_header("WARC-Identified-Payload-Type")
    kind = f"{identified}; {found.http_headers.get_header('Content-Type')}"
    return kind if "html" in kind else None


def _page(content: bytes, kind: str) -> str | bytes:
    """HTML as UTF-8, or in the encoding that it names; bytes, whose encoding is guessed, where it names none."""
    declared = _CHARSET.search(kind.encode(errors="replace") + b" " + content[:_HEAD_BYTES])
    name = declared[1].decode().lower() if declared else ""
    with suppress(UnicodeDecodeError):
        return content.decode()
    with suppress(LookupError, UnicodeError):
        return content.decode(_WIDER.get(name, name), "replace")
    return content
