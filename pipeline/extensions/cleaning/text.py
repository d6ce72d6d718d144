"""What cleaning does to a text: encoding, boilerplate, and personal data."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from datatrove.pipeline.formatters import FTFYFormatter
from datatrove.pipeline.formatters.pii import public_ip_validator

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


# --- Personal data ---

# Personal data is looked for in a text of the same length, with one spelling of digits, dashes,
# full stops and signs.
_SPELLINGS = {
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    **dict.fromkeys("‐‑‒–—―−－﹣", "-"),
    **dict.fromkeys("．․", "."),
    **dict.fromkeys("（", "("),
    **dict.fromkeys("）", ")"),
    **dict.fromkeys("\u3000\xa0\u2009", " "),
    "＠": "@",
    "＋": "+",
}
_ONE_SPELLING = str.maketrans(_SPELLINGS)
_BIRTH = r"\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
_MOBILE = r"(?:\+82[-. ]?|0)1[016789][-. ]?\d{3,4}[-. ]?\d{4}"
_LANDLINE = r"(?:\+82[-. ]?|0)(?:2|[3-6]\d|70)[-.) ]{1,2}\d{3,4}[-. ]\d{4}"
# A number is no part of a longer one, of a decimal fraction, of a version or of the number of a
# clause.
_NOT_BEHIND = r"(?<![\d-])(?<!\d\.)"
_NOT_BEFORE = r"(?![\d-]|\.\d)"
_REGISTRATION = re.compile(rf"{_NOT_BEHIND}{_BIRTH}(?:\s?-\s?)?[1-8]\d{{6}}{_NOT_BEFORE}")
_PHONE = re.compile(rf"{_NOT_BEHIND}(?:{_MOBILE}|{_LANDLINE}){_NOT_BEFORE}")
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ADDRESS = re.compile(rf"{_NOT_BEHIND}(?<![\w.])(?:{_BYTE}\.){{3}}{_BYTE}(?![\d-]|\.\d)", re.ASCII)
_NUMBERED = re.compile(
    r"(?i)(?:\bv(?:er(?:sion)?)?\.?|버전|판|제|릴리스|release|clause|section|§|조)\s*$"
)
_NUMBERED_BEHIND = re.compile(r"\s?(?:조|항|절|호|장|버전|판|version)")
_LOCAL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
_LABEL = r"[A-Za-z0-9가-힣](?:[A-Za-z0-9가-힣-]*[A-Za-z0-9가-힣])?"
_MAIL = re.compile(
    rf"(?<![A-Za-z0-9._%+-])(?:{_LOCAL}|(?<![가-힣])[가-힣][가-힣0-9._-]*)@"
    rf"(?:(?:{_LABEL}\.)+(?:한국|[A-Za-z]{{2,}})|\[(?:\d{{1,3}}\.){{3}}\d{{1,3}}\])"
)


def without_personal(text: str) -> str:
    """A text with mail and public IP addresses, Korea's phone and registration numbers replaced."""
    # Addresses before numbers: a mail address may hold what looks like a phone number.
    text = _replaced(text, _MAIL, "email@example.com")
    text = _replaced(text, _ADDRESS, "192.0.2.1", _is_public_address)
    text = _replaced(text, _REGISTRATION, "000000-0000000")
    return _replaced(text, _PHONE, "010-0000-0000")


def _replaced(
    text: str,
    pattern: re.Pattern[str],
    replacement: str,
    is_meant: Callable[[re.Match[str]], bool] | None = None,
) -> str:
    """The text with what the pattern finds replaced, however its digits and signs are spelled."""
    parts: list[str] = []
    position = 0
    # The table replaces a character by one character, so that positions are the same in both texts.
    for found in pattern.finditer(text.translate(_ONE_SPELLING)):
        if is_meant is None or is_meant(found):
            parts += [text[position : found.start()], replacement]
            position = found.end()
    parts.append(text[position:])
    return "".join(parts)


def _is_public_address(found: re.Match[str]) -> bool:
    """Whether four numbers are a public address, and not a version or the number of a clause."""
    before = found.string[: found.start()][-12:]
    behind = found.string[found.end() :][:8]
    digits = sorted(map(len, found.group().split(".")))
    # Clauses and versions count from one, and so have few digits.
    is_long = digits[-1] == 3 or digits[-2] == 2
    is_numbered = _NUMBERED.search(before) or _NUMBERED_BEHIND.match(behind)
    return bool(is_long and not is_numbered and public_ip_validator(found.group()))


def whole_text(text: str) -> str:
    """What copies of a short text have in common: its words, in NFC."""
    return " ".join(unicodedata.normalize("NFC", text).split())
