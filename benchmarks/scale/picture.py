"""The picture of slopes: how each cost that has a goal grows with the size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.scale.growth import Row
from pipeline.studies.report.drawing import Axis, Drawing
from pipeline.studies.report.plots import Chart

_WIDTH, _LINE, _LEFT = 820.0, 24.0, 470.0
_WORDS = {0.0: "constant", 1.0: "linear", 2.0: "square"}


def draw(now: Mapping[str, Sequence[Row]], before: Mapping[str, Sequence[Row]]) -> Drawing:
    """A line for each cost with a goal: a circle, and a square for what it was in `before`; both hold tables."""
    costs = [(table["title"], name) for tables in now.values() for table in tables for name in table["goals"]]
    slopes = [
        {
            (table["title"], name): slope
            for tables in of.values()
            for table in tables
            for name, slope in table["slopes"].items()
        }
        for of in (now, before)
    ]
    drawing = Drawing(_WIDTH, _LINE * (len(costs) + 2), "slopes", "How costs grow", "The exponent of each cost")
    x = Axis(-0.5, 2.5, _LEFT, _WIDTH - 20, lambda tick: _WORDS[tick], tuple(_WORDS))
    Chart(drawing, x, Axis(0, 1, _LINE * len(costs), 0, str))
    for number, cost in enumerate(costs):
        y = _LINE * (number + 0.5)
        drawing.text((_LEFT - 40, y + 4), f"{cost[0].partition(':')[0]}: {cost[1]}", "tick", "end")
        for style in (1, 0):
            if (slope := slopes[style].get(cost)) is not None:
                drawing.mark((x(min(max(slope, -0.5), 2.5)), y), style, tooltip=f"{slope:.2f}")
    return drawing
