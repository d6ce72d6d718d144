"""What grows with ranks, shards, files and steps: a thousand ranks and 10^12 tokens on one machine.

    python -m benchmarks.scale --json benchmarks/out/scale.json --picture docs/scale.svg

The project's own code runs on inputs that are large in number and small on disk: sparse files,
links, and light processes. docs/scale.md says what is simulated. Each table has the costs at
several sizes, and says of each cost how it grows: `slope` is the exponent, so that 0 is constant, 1
linear, and 2 the square. `goal` is the most that the cost may be at the largest size. Costs are
processor times, memory, files opened and bytes sent, which hardly depend on other load.

TMPDIR takes some GB and 10^6 files.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.results import Row, make_parser
from pipeline.errors import UserError
from pipeline.extensions.report.figures.drawing import Drawing, set_ticks
from pipeline.extensions.report.figures.style import SOFT, TICK_SIZE
from pipeline.extensions.report.html_page import write_figure
from pipeline.files.json_files import read_object, write_json

SUBJECTS = ("corpora", "ranks", "muon", "watchdog", "run_folder")
_WIDTH = 820.0
_LINE_HEIGHT = 24.0
_LEFT = 470.0
_RANGE = (-0.5, 2.5)
_NAMES = {0.0: "constant", 1.0: "linear", 2.0: "square"}
"""What the exponents of growth are called."""


def slopes(found: Mapping[str, Sequence[Row]]) -> list[tuple[str, float]]:
    """The name and the slope of each cost with a goal, in the tables of all subjects."""
    costs: list[tuple[str, float]] = []
    for tables in found.values():
        for table in tables:
            title = table["title"].partition(":")[0]
            variable = next(iter(table["rows"][0]))
            for name in table["goals"]:
                slope = table["slopes"][name]
                if slope is not None:
                    costs.append((f"{title}: {name} by {variable}", slope))
    return costs


def draw(costs: Sequence[tuple[str, float]]) -> Drawing:
    """A line for each cost, and a circle at its slope."""
    area_height = _LINE_HEIGHT * len(costs)
    drawing = Drawing(
        _WIDTH,
        area_height + 2 * _LINE_HEIGHT,
        "slopes",
        "How costs grow",
        "The exponent of each cost",
    )
    axes = drawing.add_axes(_LEFT, 0, _WIDTH - 20, area_height)
    axes.set_xlim(*_RANGE)
    axes.set_ylim(len(costs), 0)
    set_ticks(axes.xaxis, list(_NAMES), list(_NAMES.values()))
    set_ticks(axes.yaxis, [], [])
    axes.axvline(0.0, color=SOFT, linewidth=1.0)
    for number, (label, slope) in enumerate(costs):
        y = _LINE_HEIGHT * (number + 0.5)
        drawing.text((_LEFT - 40, y + 4), label, TICK_SIZE, color=SOFT, align="right")
        # A slope beyond the picture is shown at its edge; its tooltip has the number.
        shown = min(max(slope, _RANGE[0]), _RANGE[1])
        at = drawing.position(axes, (shown, number + 0.5))
        drawing.mark(at, 0, tooltip=f"{slope:.2f}")
    return drawing


def main() -> None:
    parser = make_parser(__doc__, "python -m benchmarks.scale")
    parser.add_argument(
        "--only", nargs="*", choices=SUBJECTS, default=SUBJECTS, help="some subjects, or none"
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="sizes that take seconds, to see that everything runs",
    )
    parser.add_argument(
        "--picture", type=Path, help="also draw the slopes of all tables in --json, as SVG"
    )
    options = parser.parse_args()
    found: dict[str, list[Row]] = {}
    if options.json and options.json.exists():
        # Tables of other subjects stay in it.
        found = read_object(options.json, UserError)
    for subject in options.only:
        began = time.monotonic()
        measure = importlib.import_module(f"benchmarks.scale.{subject}").measure
        with tempfile.TemporaryDirectory(prefix=f"scale-{subject}-") as scratch:
            found[subject] = list(measure(Path(scratch), options.smallest))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, found)
        print(f"{subject}: {time.monotonic() - began:.0f} s", flush=True)
    if options.picture:
        write_figure(draw(slopes(found)), options.picture)


if __name__ == "__main__":
    main()
