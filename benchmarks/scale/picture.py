"""The picture of slopes: how each cost that has a goal grows with the size.

python -m benchmarks.scale.picture benchmarks/out/scale.json --beside before.json --output docs/scale.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from benchmarks.scale.growth import Row
from pipeline.errors import UserError
from pipeline.files import read_object, write_text
from pipeline.studies.report.drawing import Axis, Drawing
from pipeline.studies.report.page import svg_file
from pipeline.studies.report.plots import Chart

_WIDTH, _LINE, _LEFT = 820.0, 24.0, 470.0
_WORDS = {0.0: "constant", 1.0: "linear", 2.0: "square"}
NOW, BEFORE = 0, 1


def draw(tables: Mapping[str, Row], before: Mapping[str, Row]) -> Drawing:
    """A line for each cost with a goal; `tables` and `before`, which may be empty, are by their titles."""
    costs = [(title, name) for title, found in tables.items() for name in found["goals"]]
    drawing = Drawing(_WIDTH, _LINE * (len(costs) + 2), "slopes", "How costs grow", "The exponent of each cost")
    x = Axis(-0.5, 2.5, _LEFT, _WIDTH - 20, lambda tick: _WORDS[tick], tuple(_WORDS))
    Chart(drawing, x, Axis(0, 1, _LINE * len(costs), 0, str))
    for number, (title, name) in enumerate(costs):
        y = _LINE * (number + 0.5)
        drawing.text((_LEFT - 40, y + 4), f"{title.partition(':')[0]}: {name}", "tick", "end")
        for style, found in ((BEFORE, before), (NOW, tables)):
            slope = found.get(title, {}).get("slopes", {}).get(name)
            if slope is not None:
                drawing.mark((x(min(max(slope, -0.5), 2.5)), y), style, tooltip=f"{slope:.2f}")
    return drawing


def tables_in(path: Path | None) -> dict[str, Row]:
    """The tables in what the benchmark wrote, by their titles."""
    if path is None:
        return {}
    return {found["title"]: found for subject in read_object(path, UserError).values() for found in subject}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="what the benchmark wrote")
    parser.add_argument("--beside", type=Path, help="what it wrote for an earlier version: squares")
    parser.add_argument("--output", type=Path, required=True, help="the picture, an SVG file")
    options = parser.parse_args()
    write_text(options.output, svg_file(draw(tables_in(options.tables), tables_in(options.beside))))


if __name__ == "__main__":
    main()
