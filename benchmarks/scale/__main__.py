"""What grows with ranks, shards, files and steps, tried on one machine: sparse files, light
processes, links.

    python -m benchmarks.scale --json benchmarks/out/scale.json --picture docs/scale.svg

Slopes are the exponents by which costs grow. docs/scale.md says what is simulated. TMPDIR takes
some GB and 10^6 files.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.results import Row, make_parser
from pipeline.errors import UserError
from pipeline.files import read_object, write_json, write_text
from pipeline.studies.report.drawing import Axis, Drawing
from pipeline.studies.report.page import svg_file
from pipeline.studies.report.plots import Chart

SUBJECTS = ("corpora", "ranks", "watchdog", "run_folder")
_WIDTH, _LINE, _LEFT = 820.0, 24.0, 470.0
_WORDS = {0.0: "constant", 1.0: "linear", 2.0: "square"}


def draw(found: Mapping[str, Sequence[Row]]) -> Drawing:
    """A line for each cost with a goal in the tables of all subjects, and a circle at its slope."""
    tables = [table for of in found.values() for table in of]
    costs = [
        (table, name)
        for table in tables
        for name in table["goals"]
        if table["slopes"][name] is not None
    ]
    drawing = Drawing(
        _WIDTH, _LINE * (len(costs) + 2), "slopes", "How costs grow", "The exponent of each cost"
    )
    x = Axis(-0.5, 2.5, _LEFT, _WIDTH - 20, lambda tick: _WORDS[tick], tuple(_WORDS))
    Chart(drawing, x, Axis(0, 1, _LINE * len(costs), 0, str))
    for number, (table, name) in enumerate(costs):
        y, slope = _LINE * (number + 0.5), table["slopes"][name]
        label = f"{table['title'].partition(':')[0]}: {name} by {next(iter(table['rows'][0]))}"
        drawing.text((_LEFT - 40, y + 4), label, "tick", "end")
        drawing.mark((x(min(max(slope, -0.5), 2.5)), y), 0, tooltip=f"{slope:.2f}")
    return drawing


def main() -> None:
    parser = make_parser(__doc__)
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
    found = read_object(options.json, UserError) if options.json and options.json.exists() else {}
    for subject in options.only:
        began = time.monotonic()
        measure = importlib.import_module(f"benchmarks.scale.{subject}").measure
        with tempfile.TemporaryDirectory(prefix=f"scale-{subject}-") as scratch:
            found[subject] = list(measure(Path(scratch), options.smallest))
        if options.json:  # tables of other subjects stay in it
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, found)
        print(f"{subject}: {time.monotonic() - began:.0f} s", flush=True)
    if options.picture:
        write_text(options.picture, svg_file(draw(found)))


if __name__ == "__main__":
    main()
