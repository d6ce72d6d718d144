"""How numbers are written."""

from __future__ import annotations

import math

from pipeline.extensions.report.formats import change, count, figure_format, number, percent


def test_numbers_are_written_as_people_do():
    space = "\N{NARROW NO-BREAK SPACE}"
    changes = [
        change(math.log(ratio)) for ratio in (0.39, 0.002, 0.0001, 1.0, 1.015, 1.2, 2, 12345)
    ]
    expected = [
        f"−61{space}%",
        f"−99.8{space}%",
        "÷10,000",
        f"0{space}%",
        f"+1.5{space}%",
        f"+20{space}%",
    ]
    assert changes == [*expected, "×2", "×12,345"]
    assert change(math.inf) == "∞"
    assert [percent(share) for share in (0.0, 0.005, 0.12, 1.0)] == [
        f"{n}{space}%" for n in ("0", "0.5", "12", "100")
    ]
    assert [count(n) for n in (812, 45_200, 1_236_000_000)] == [
        "812",
        f"45.2{space}k",
        f"1.24{space}B",
    ]
    assert [number(n) for n in (1.5, 17.24, 12_300)] == ["1.50", "17.24", "12,300.00"]
    assert [figure_format("perplexity")(n) for n in (6.5, 1234.5, math.inf)] == [
        "6.50",
        "1,234.50",
        "∞",
    ]


def test_large_numbers_are_written_as_powers_of_ten():
    assert [number(value) for value in (99_999, 123_456, 1e8, 1.2e15)] == [
        "99,999.00",
        "1.2·10⁵",
        "10⁸",
        "1.2·10¹⁵",
    ]
    assert [change(math.log(ratio)) for ratio in (1e8, 1e-8, 23_441.0, 2.5e6)] == [
        "×10⁸",
        "÷10⁸",
        "×23,441",
        "×2.5·10⁶",
    ]
