"""What cleaning does to a text: encoding and boilerplate."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from datatrove.pipeline.formatters import FTFYFormatter

_HANGUL = re.compile("[가-힣]")
_LATIN_1 = re.compile("[\x80-\xff]")
_LATIN_1_RUN = re.compile("[\x80-\xff]+")
# Of Wansung, the code that CP949 extends: syllables of texts have a first byte from B0 to C8.
_WANSUNG_PAIR = re.compile("[\xb0-\xc8][\xa1-\xfe]")
_LEAST_SYLLABLES = 2
_LEAST_WANSUNG = 0.8
_fixed_by_ftfy: Callable[[str], str] = FTFYFormatter(normalization="NFC").format


def with_fixed_encoding(text: str) -> str:
    """A text that was decoded as Latin-1 as it was meant, UTF-8 or CP949.

    It has no control characters, and is in NFC.
    """
    found = _from_cp949(text)
    if found is None:
        found = text
    return _fixed_by_ftfy(found)


def _from_cp949(text: str) -> str | None:
    """What a text becomes as CP949, where that is likelier than UTF-8 and than what it is."""
    # Korean in CP949, read as Latin-1, is mostly letters beyond ASCII.
    if len(_LATIN_1.findall(text)) * 5 < len(text):
        return None
    try:
        stored = text.encode("latin-1")
        found = stored.decode("cp949")
    except UnicodeError:
        return None
    if _is_utf8(stored):
        # Text in CP949 hardly ever is.
        return None
    pairs = 0
    in_wansung = 0
    for run in _LATIN_1_RUN.findall(text):
        # Two bytes each, if this is CP949.
        pairs += len(run)
        in_wansung += len(_WANSUNG_PAIR.findall(run))
    pairs //= 2
    syllables = len(_HANGUL.findall(found))
    is_likely = syllables >= _LEAST_SYLLABLES and in_wansung >= _LEAST_WANSUNG * pairs
    is_korean = syllables * 5 > len(found)
    return found if is_likely and is_korean else None


def _is_utf8(stored: bytes) -> bool:
    try:
        stored.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- Boilerplate ---

_MARK = re.compile(
    r"(?i)무단\s?(?:전재|복제|배포)(?:\s?(?:및|[-,·/])?\s?(?:재배포|배포|복제))?(?:\s?금지)?|"
    r"재배포\s?금지|"
    r"저작권자\s?[ⓒ©(]|기사\s?제보|"
    r"구독\s?신청|댓글\s?\d+개?$|"
    r"all rights reserved|(?:cookie|privacy) policy|terms of (?:use|service)|"
    r"subscribe to our|share (?:this )?on"
)
"""What pages are marked, signed or framed with."""
# A line with more characters before its first mark, or behind its last one, is a text that mentions
# it.
_MOST_BEFORE = 60
_MOST_AFTER = 80
_WORD = re.compile(r"[^\W\d_]+")
_FILLER = re.compile(
    r"(?i)(?:본|이|및|또는|기사|콘텐츠|컨텐츠|저작|사이트|게시물|글|자료|뉴스|신문|법|보호|받|금지|금합|합니다|됩니다|있습니다|처벌|"
    r"상업|이용|사용|허가|없이|무단|복제|전재|배포|재배포|학습|활용|문의|안내).*|by|using|this|site|website|you|your|our|we|us|"
    r"agree|to|and|the|a|an|for|of|in|on|or|is|are|with|latest|news|newsletter|email|"
    r"please|see|read|view|click|here|use|"
    r"cookies|facebook|twitter|copyright|accept|continue|more"
)
"""Words that stand beside such marks, and say nothing of their own."""
_SENTENCE_END = re.compile(r"(?:[다요죠까][\s.!?…\"'”’)]*|[.!?…][\"'”’)]*)$")
_LEAST_OWN_WORDS = 2


def without_boilerplate_lines(text: str) -> str:
    """A text without the lines that only mark, sign or frame a page.

    A sentence that mentions such a mark stays.
    """
    lines = text.split("\n")
    kept = [line for line in lines if not _is_boilerplate(line)]
    return "\n".join(kept)


def _is_boilerplate(line: str) -> bool:
    """Whether a line only marks, signs or frames a page."""
    marks = list(_MARK.finditer(line))
    if not marks:
        return False
    if marks[0].start() > _MOST_BEFORE or len(line) - marks[-1].end() > _MOST_AFTER:
        return False
    ends_with_mark = not _WORD.search(line, marks[-1].end())
    if ends_with_mark or not _SENTENCE_END.search(line):
        return True
    words = _WORD.findall(_MARK.sub(" ", line))
    own = [word for word in words if not _FILLER.fullmatch(word)]
    return len(own) < _LEAST_OWN_WORDS


def whole_text(text: str) -> str:
    """What copies of a short text have in common: its words, in NFC."""
    return " ".join(unicodedata.normalize("NFC", text).split())
