"""Figures as SVG files: for light and dark pages, with text as text."""

from __future__ import annotations

from xml.etree import ElementTree

from pipeline.extensions.report.figures.drawing import Drawing
from pipeline.extensions.report.figures.style import LIGHT
from pipeline.extensions.report.figures.svg import inline_svg
from pipeline.extensions.report.html_page import write_figure


def test_colours_are_the_variables_of_the_style_sheet(tmp_path):
    drawing = Drawing(100, 50, "test", title="A title <b>", description="more")
    drawing.mark((20, 20), 3, tooltip="a & b")
    drawing.text((10, 10), "words", 12.0, kind="label")
    inline = inline_svg(drawing)
    assert "var(--style-3)" in inline and not any(color in inline for color in LIGHT.values())
    assert ">words</text>" in inline and "<title>a &amp; b</title>" in inline
    assert 'class="label"' in inline and "A title &lt;b&gt;" in inline

    write_figure(drawing, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).get("viewBox") == "-18 -18 136 86"
    assert "prefers-color-scheme: dark" in text and LIGHT["style-3"] in text


def test_a_figure_without_a_title_is_decoration():
    assert 'aria-hidden="true"' in inline_svg(Drawing(16, 16, "mark"))
