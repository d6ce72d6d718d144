"""Panels over steps: names are whole, and levels and stages are drawn."""

from __future__ import annotations

from pipeline.extensions.report.figures.plots import Level, Panel, Series, StepsPlot
from pipeline.extensions.report.figures.svg import inline_svg

POINTS = [(0.0, 9.0), (10.0, 4.0), (20.0, 3.0)]


def plot(labels, **changes) -> StepsPlot:
    series = [Series(label, number, [POINTS]) for number, label in enumerate(labels)]
    panels = [Panel(f"corpus {number}", series, "logarithmic", **changes) for number in (1, 2)]
    return StepsPlot("name", "title", "caption", "description", panels)


def test_names_of_lines_are_wrapped_where_they_do_not_fit_and_never_cut():
    labels = ["demo without its gate", "demo + gate", "full fine-tuning by Muon at 4e-3"]
    for width in (820.0, 358.0):
        svg = inline_svg(plot(labels).draw(width))
        assert "\N{HORIZONTAL ELLIPSIS}" not in svg
        for word in " ".join(labels).split():
            assert word in svg
    # Too long for half a row: the panels are below each other.
    assert plot(labels).draw(820.0).height > 1.9 * plot(["short"]).draw(820.0).height


def test_a_level_has_its_name_and_the_axis_holds_it():
    drawing = plot(["now"], levels=[Level("base 90", 90.0)], boundaries=[15.0]).draw(820.0)
    axes = drawing.figure.axes[0]
    assert axes.get_ylim()[1] > 90
    styles = [line.get_linestyle() for line in axes.lines]
    assert "--" in styles and ":" in styles
    assert "base 90" in inline_svg(drawing)


def test_a_linear_axis_shows_values_of_any_size():
    for last in (1e-6, 3.0, 5e7, -4.0):
        panel = Panel("rate", [Series("end", 0, [[(0.0, 0.0), (9.0, last)]])], "linear")
        axes = StepsPlot("n", "t", "c", "d", [panel]).draw(400.0).figure.axes[0]
        low, high = axes.get_ylim()
        assert high - low < 1.5 * abs(last), "a flat line"
