"""Personal data in texts: mail and IP addresses, Korea's phone and registration numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date

from datatrove.pipeline.formatters.pii import public_ip_validator

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
    "：": ":",
}
_ONE_SPELLING = str.maketrans(_SPELLINGS)
# A number is no part of a longer one, of a decimal fraction, of a version, of the number of a
# clause, or of an identifier such as a DOI.
_NOT_BEHIND = r"(?<![\d-])(?<!\d[./])"
_NOT_BEFORE = r"(?![\d-]|\.\d)"
_LABEL_BEFORE = 16
"""Characters before a number in which a word may say what it is."""


def without_personal(text: str) -> str:
    """A text with mail and public IP addresses, Korea's phone and registration numbers replaced."""
    # Addresses before numbers: a mail address may hold what looks like a phone number.
    text = _replaced(text, _MAIL, "email@example.com", _is_mail)
    text = _replaced(text, _ADDRESS, "192.0.2.1", _is_public_address)
    text = _replaced(text, _REGISTRATION, "000000-0000000", _is_registration)
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


# --- Phone numbers ---

# The prefix of a network or an area, of which a part may be in brackets: (010), +82 (0)10, (+82)10.
_COUNTRY = r"(?:\+82|\(\+82\))[-. ]?(?:\(0\)|0)?"
_MOBILE_PREFIX = r"1[016789]"
_AREA = r"(?:2|[3-6]\d|70)"
_MOBILE = (
    rf"(?:(?:{_COUNTRY}|0){_MOBILE_PREFIX}|\((?:{_COUNTRY}|0){_MOBILE_PREFIX}\))"
    r"[-. ]?\d{3,4}[-. ]?\d{4}"
)
_LANDLINE = (
    rf"(?:(?:{_COUNTRY}|0){_AREA}[-.) ]{{1,2}}|\((?:{_COUNTRY}|0){_AREA}\)[-. ]?)"
    r"\d{3,4}[-. ]\d{4}"
)
# Before 호, which counts documents and rooms, it is no phone's; 호출 is a call.
_PHONE = re.compile(rf"{_NOT_BEHIND}(?:{_MOBILE}|{_LANDLINE}){_NOT_BEFORE}(?!호(?!출))")

# --- Registration numbers ---

_BIRTH = r"\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
_REGISTRATION = re.compile(
    rf"{_NOT_BEHIND}(?P<birth>{_BIRTH})(?P<dash>[ \t]?-[ \t]?)?(?P<rest>[1-8]\d{{6}}){_NOT_BEFORE}"
)
_OF_A_PERSON = re.compile(r"(?:주민|외국인)\s?(?:등록)?\s?(?:번호)?[^\w\n]*$")
_OF_A_THING = re.compile(
    r"(?i)(?:법인|사업자|운송장|송장|택배|주문|상품|제품|품목|품번|바코드|코드|타임스탬프|timestamp|"
    r"일련|관리|계좌|isbn|ean|gtin|sku|barcode)[가-힣]*\s?(?:번호|코드)?[^\w\n]*$"
)
# Weights of the first twelve digits: of registration numbers, and of corporations' and barcodes'.
_PERSON_WEIGHTS = (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)
_CORPORATION_WEIGHTS = (1, 2) * 6
_BARCODE_WEIGHTS = (1, 3) * 6
_KOREAN_BARCODE = "880"
# Since then the digits behind the one of the sex are drawn at random, without a check digit.
_WITHOUT_CHECK_DIGIT = date(2020, 10, 5)
# Years of birth. What looks like an earlier one is a date of the 2010s or 2020s in an order number,
# or milliseconds; a later one does not exist yet.
_OLDEST = 1926
_YOUNGEST = 2035


def _is_registration(found: re.Match[str]) -> bool:
    """Whether thirteen digits are the registration number of a person.

    Barcodes, milliseconds, corporations and orders have numbers of that form, too. A valid check
    digit tells; of numbers with a dash also a birth after which there is none. A number with a dash
    and a possible birth is replaced in doubt: numbers that are changed have no check digit either.
    """
    before = found.string[: found.start()][-_LABEL_BEFORE:]
    if _OF_A_PERSON.search(before):
        return True
    born = _birth_of(found["birth"], int(found["rest"][0]))
    if born is None or not _OLDEST <= born.year <= _YOUNGEST or _OF_A_THING.search(before):
        return False
    digits = [*map(int, found["birth"] + found["rest"])]
    has_dash = found["dash"] is not None
    if _has_person_check_digit(digits):
        is_barcode = found["birth"].startswith(_KOREAN_BARCODE) and _ends_sum_of_ten(
            digits, _BARCODE_WEIGHTS
        )
        return has_dash or not is_barcode
    if not has_dash:
        return False
    return born >= _WITHOUT_CHECK_DIGIT or not _ends_sum_of_ten(digits, _CORPORATION_WEIGHTS)


def _birth_of(digits: str, sex: int) -> date | None:
    """The birth that a registration number begins with; None for a day that does not exist."""
    # 1, 2, 5 and 6 are of those who were born before 2000.
    century = 1900 if sex in (1, 2, 5, 6) else 2000
    try:
        return date(century + int(digits[:2]), int(digits[2:4]), int(digits[4:]))
    except ValueError:
        return None


def _has_person_check_digit(digits: list[int]) -> bool:
    total = sum(weight * digit for weight, digit in zip(_PERSON_WEIGHTS, digits, strict=False))
    # Of foreigners it is two more.
    is_foreigner = digits[6] >= 5
    return (11 - total % 11 + 2 * is_foreigner) % 10 == digits[-1]


def _ends_sum_of_ten(digits: list[int], weights: tuple[int, ...]) -> bool:
    """Whether the last digit brings the weighted sum of the others to a multiple of ten."""
    total = sum(weight * digit for weight, digit in zip(weights, digits, strict=False))
    return (total + digits[-1]) % 10 == 0


# --- IP addresses ---

_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ADDRESS = re.compile(rf"{_NOT_BEHIND}(?<![\w.])(?:{_BYTE}\.){{3}}{_BYTE}(?![\d-]|\.\d)", re.ASCII)
_NUMBERED = re.compile(
    r"(?i)(?:\bv(?:er(?:sion)?)?\.?|버전|판|제|릴리스|release|clause|section|§|조)\s*$"
)
_NUMBERED_BEHIND = re.compile(r"\s?(?:조|항|절|호|장|버전|판|version)")


def _is_public_address(found: re.Match[str]) -> bool:
    """Whether four numbers are a public address, and not a version or the number of a clause."""
    before = found.string[: found.start()][-12:]
    behind = found.string[found.end() :][:8]
    digits = sorted(map(len, found.group().split(".")))
    # Clauses and versions count from one, and so have few digits.
    is_long = digits[-1] == 3 or digits[-2] == 2
    is_numbered = _NUMBERED.search(before) or _NUMBERED_BEHIND.match(behind)
    return bool(is_long and not is_numbered and public_ip_validator(found.group()))


# --- Mail addresses ---

_LOCAL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
_LABEL = r"[A-Za-z0-9가-힣](?:[A-Za-z0-9가-힣-]*[A-Za-z0-9가-힣])?"
_MAIL = re.compile(
    rf"(?<![A-Za-z0-9._%+-])(?P<local>{_LOCAL}|(?<![가-힣])[가-힣][가-힣0-9._-]*)@"
    rf"(?P<host>(?:(?:{_LABEL}\.)+(?:한국|[A-Za-z]{{2,}})|\[(?:\d{{1,3}}\.){{3}}\d{{1,3}}\]))"
)
# Endings of files that are no domains: `icon@2x.png` is a picture for a dense screen.
_FILE = re.compile(
    r"(?i)\.(?:png|jpe?g|gif|svg|webp|bmp|ico|avif|heic|tiff?|psd|css|less|scss|js|mjs|json|xml|"
    r"html?|pdf|mp[34]|m4a|avi|webm|wav|ogg|woff2?|ttf|otf|eot|txt|csv|tsv|ya?ml)$"
)
_DENSITY = re.compile(r"\d+(?:\.\d+)?x\.\w+$")
# Users of services, such as git@github.com:org/repository.
_SERVICE_USERS = ("git", "hg", "svn")


def _is_mail(found: re.Match[str]) -> bool:
    """Whether a name, a sign and a host are a mail address, and not a file or a repository."""
    host = found["host"]
    if _FILE.search(host) or _DENSITY.match(host):
        return False
    return found["local"] not in _SERVICE_USERS
