"""Kinds of text that no package has: samples of code that were written for this project, and
formulas, tables, data, addresses and signs that are drawn at random."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from studies.gate_negatives.records import Record, generator

RECORDS = 16
"""How many records a kind has that is drawn at random."""
_CODE = Path(__file__).parent / "code_samples.txt"
_WORDS = (
    "area base code date east file gain hour item join key line map node open page rate size time "
    "unit value width year zone alpha beta count delta error field group index limit model name "
    "order price query range score table user weight"
)
_GREEK = "αβγδεζηθλμνξπρστφχψωΓΔΘΛΣΦΨΩ"
_OPERATORS = "+ − × ÷ · ± ≤ ≥ < > = ≠ ≈ ≡ ∝ ∈ ∉ ⊂ ⊆ ∪ ∩ ∧ ∨ ⇒ ⇔ → ↦ ∘ ⊕ ⊗"
_SIGNS = (
    "✓ ✗ ★ ☆ • ◦ ‣ § ¶ † ‡ © ® ™ № ° ′ ″ ½ ¼ ¾ ⅓ € £ ¥ ₹ ₽ ¢ … – — “quoted” „zitiert“ «cité» ‘so’ "
    "← ↑ → ↓ ↔ ■ □ ▲ ● ○ ♠ ♣ ♥ ♦ ♪ ♫ ☎ ✉ ⌘ ⏎ ⚠ ❗ ① ② ③ ㎏ ㎡ ℃ ﬁ ﬂ １２３ ＡＢＣ （注） 【※】 「」 、。"
)
_EMOJI = "😀 😂 🙂 😍 🤔 👍 🙏 🎉 ❤️ 🔥 ✨ 🚀 🌍 🍎 ⚽ 🎵 🏠 📷 💡 ✅ 👩‍💻 🇫🇷 🇧🇷 👨‍👩‍👧 🏳️‍🌈 ☀️ ⛄ 🐍"


def sample_records() -> Iterator[Record]:
    """The samples of code, and the records that are drawn."""
    yield from code_samples()
    drawn: dict[str, Callable[[random.Random], str]] = {
        "formulas": _formula,
        "tables": _table,
        "json": _json,
        "urls": _addresses,
        "numbers": _numbers,
        "symbols": _signs,
        "emoji": _emoji,
        "diacritics": _diacritics,
    }
    for kind, draw in drawn.items():
        rng = generator(kind)
        for _ in range(RECORDS):
            yield Record(kind, draw(rng))


def code_samples() -> Iterator[Record]:
    """Each sample as a whole, and its parts between empty lines."""
    # A line `== code:c` begins a sample: kinds and texts alternate.
    _, *parts_of_file = re.split(r"(?m)^== (\S+)$", _CODE.read_text(encoding="utf-8"))
    for kind, text in zip(parts_of_file[::2], parts_of_file[1::2], strict=True):
        text = text.strip("\n")
        yield Record(kind, text)
        parts = text.split("\n\n")
        if len(parts) == 1:
            lines = text.splitlines()
            parts = ["\n".join(lines[:3]), "\n".join(lines[3:])]
        for part in parts:
            yield Record(kind, part.strip("\n"))


def _name(rng: random.Random) -> str:
    return "_".join(rng.sample(_WORDS.split(), rng.randint(1, 2)))


def _formula(rng: random.Random) -> str:
    """Equations in plain Unicode and in TeX, some with words around them."""

    def term() -> str:
        symbol = rng.choice([*_GREEK, *"xyzntabcfk"])
        forms = (
            symbol,
            f"{symbol}²",
            f"{symbol}ₙ",
            f"{symbol}({rng.choice('xtn')})",
            f"{rng.randint(2, 99)}{symbol}",
            f"√{symbol}",
            f"|{symbol}|",
            f"{symbol}/{rng.randint(2, 9)}",
        )
        return rng.choice(forms)

    equations: list[str] = []
    for _ in range(rng.randint(3, 6)):
        parts = [term()]
        for _ in range(rng.randint(1, 4)):
            parts += [rng.choice(_OPERATORS.split()), term()]
        equations.append(" ".join(parts))
    big = rng.choice(["∑", "∏", "∫", "lim", "max", "∂", "∇"])
    tex = (
        f"$$\\sum_{{i=1}}^{{n}} \\frac{{{rng.choice('xyz')}_i^{rng.randint(2, 4)}}}"
        f"{{\\{rng.choice(['alpha', 'sigma', 'pi'])} + {rng.randint(1, 9)}}}$$"
    )
    begin = rng.choice(["∀ n ∈ ℕ: ", "∃ ε > 0: ", "Let ", "For x ∈ ℝ, ", "Thus ", "f: A → B, "])
    return f"{begin}{equations[0]}; {big} {', '.join(equations[1:])}. {tex}"


def _table(rng: random.Random) -> str:
    """A table: Markdown's, with tabs, with commas, or with lines."""
    columns = rng.randint(2, 5)
    rows = [[_name(rng) for _ in range(columns)]]
    for _ in range(rng.randint(3, 8)):
        cells = [_name(rng)]
        cells += [
            rng.choice(["%.2f", "%d", "%.1f %%"]) % rng.uniform(0, 9999) for _ in range(columns - 1)
        ]
        rows.append(cells)
    style = rng.choice(["markdown", "\t", ",", ";", "box"])
    if style == "markdown":
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|" + "---|" * columns)
    elif style == "box":
        lines = ["│ " + " │ ".join(cell.ljust(9) for cell in row) + " │" for row in rows]
        lines.insert(1, "├" + "┼".join(["─" * 11] * columns) + "┤")
    else:
        lines = [style.join(row) for row in rows]
    return "\n".join(lines)


def _json(rng: random.Random) -> str:
    """A document of JSON, indented or not."""

    def value(depth: int) -> object:
        if depth == 0 or rng.random() < 0.4:
            return rng.choice(
                [
                    rng.randrange(10**6),
                    rng.random(),
                    _name(rng),
                    None,
                    True,
                    False,
                    f"{rng.getrandbits(64):x}",
                ]
            )
        if rng.random() < 0.4:
            return [value(depth - 1) for _ in range(rng.randint(1, 4))]
        return {_name(rng): value(depth - 1) for _ in range(rng.randint(1, 4))}

    document = {_name(rng): value(3) for _ in range(rng.randint(2, 4))}
    return json.dumps(document, indent=rng.choice([None, 2, 4]))


def _addresses(rng: random.Random) -> str:
    """Addresses of pages, mail, files and machines."""
    found: list[str] = []
    for _ in range(rng.randint(3, 6)):
        host = f"{rng.choice(_WORDS.split())}{rng.choice(['.example.org', '.example.com', '-x.example.net'])}"
        forms = (
            f"https://www.{host}/{_name(rng)}/{rng.randrange(9999)}?{_name(rng)}={rng.randrange(99)}&q=a%20b",
            f"http://{host}:8080/{_name(rng)}.html#{_name(rng)}",
            f"{_name(rng)}@{host}",
            f"/usr/lib/{_name(rng)}/{_name(rng)}-{rng.randint(1, 9)}.{rng.randint(0, 20)}.so",
            f"C:\\Users\\{_name(rng)}\\{_name(rng)}.docx",
            f"192.0.2.{rng.randrange(256)}/24",
            f"doi:10.{rng.randint(1000, 9999)}/{_name(rng)}.{rng.randrange(10**6)}",
        )
        found.append(rng.choice(forms))
    return rng.choice([" ", "\n", ", "]).join(found)


def _numbers(rng: random.Random) -> str:
    """Numbers, dates, amounts and times: in lines, or in rows."""
    made: list[str] = []
    for _ in range(rng.randint(8, 24)):
        number = rng.uniform(0, 10 ** rng.randint(1, 7))
        forms = (
            f"{number:.0f}",
            f"{number:,.2f}",
            f"{number:.3e}",
            f"{rng.randint(1900, 2040)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
            f"{rng.randint(0, 100)}%",
            f"${number:.2f}",
            f"+{rng.randint(1, 99)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}",
            f"0x{rng.getrandbits(32):08X}",
        )
        made.append(rng.choice(forms))
    return rng.choice([" ", "\n", "\t", ", "]).join(made)


def _signs(rng: random.Random) -> str:
    """Typographic signs between a few words."""
    parts = rng.sample(_SIGNS.split(), 14) + rng.sample(_WORDS.split(), 6)
    rng.shuffle(parts)
    return " ".join(parts)


def _emoji(rng: random.Random) -> str:
    parts = rng.sample(_EMOJI.split(), 10) + rng.sample(_WORDS.split(), 5)
    rng.shuffle(parts)
    return rng.choice(["", " "]).join(parts)


def _diacritics(rng: random.Random) -> str:
    """Words of Latin letters with one or two diacritics, as many languages write them."""
    letters: list[str] = []
    for code in [*range(0xC0, 0x250), *range(0x1E00, 0x1F00)]:
        if unicodedata.category(chr(code)) == "Ll":
            letters.append(chr(code))
    words: list[str] = []
    for _ in range(rng.randint(6, 20)):
        plain = [rng.choice("aeioubcdfglmnprstvz") for _ in range(rng.randint(2, 8))]
        plain[rng.randrange(len(plain))] = rng.choice(letters)
        words.append("".join(plain))
    return " ".join(words)
