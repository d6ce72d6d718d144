"""Figures as SVG: inside a page, or as files. Both follow light and dark pages, with no script."""

from __future__ import annotations

import re
import warnings
from io import StringIO
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context

from pipeline.extensions.report.figures.drawing import Drawing
from pipeline.extensions.report.figures.style import LIGHT

_MARGIN = 18.0
"""Of a figure in a file of its own."""
_SETTINGS = {
    # Text stays text: it has the page's fonts, and readers can select it.
    "svg.fonttype": "none",
    # matplotlib's own, for layout; figures.css has the page's fonts.
    "font.family": "DejaVu Sans",
    "axes.unicode_minus": True,
}
# Figures are drawn in the colours of a light page, and shown in those of the reader's page.
_VARIABLES = {color: f"var(--{name})" for name, color in LIGHT.items()}
_COLOR = re.compile("#[0-9a-f]{6}")
_HREF = "{http://www.w3.org/1999/xlink}href"


def inline_svg(drawing: Drawing) -> Markup:
    """The element for an HTML page whose style sheet has figures.css."""
    root = _element(drawing)
    root.set("viewBox", f"0 0 {drawing.width:g} {drawing.height:g}")
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def svg_file(drawing: Drawing, style_sheet: str) -> str:
    """A file with its own style sheet, a background, and a margin."""
    root = _element(drawing)
    width = drawing.width + 2 * _MARGIN
    height = drawing.height + 2 * _MARGIN
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.set("width", f"{width:g}")
    root.set("height", f"{height:g}")
    root.set("viewBox", f"{-_MARGIN:g} {-_MARGIN:g} {width:g} {height:g}")
    style = ElementTree.Element("style")
    style.text = style_sheet
    ground = ElementTree.Element(
        "rect",
        {
            "class": "ground",
            "x": f"{-_MARGIN:g}",
            "y": f"{-_MARGIN:g}",
            "width": "100%",
            "height": "100%",
        },
    )
    root.insert(0, style)
    root.insert(1, ground)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _element(drawing: Drawing) -> ElementTree.Element:
    """matplotlib's SVG, without what a page does not need, in the variables of figures.css."""
    root = ElementTree.fromstring(_matplotlib_svg(drawing))
    _remove(root, {"metadata", "clipPath", "style"})
    for element in root.iter():
        _clean(element)
    _inline_markers(root)
    # Nothing refers to definitions any more.
    _remove(root, {"defs"})

    root.attrib = {"class": "figure"}
    if not drawing.title:
        root.set("aria-hidden", "true")
        return root
    title = ElementTree.Element("title", {"id": f"{drawing.name}-title"})
    title.text = drawing.title
    description = ElementTree.Element("desc", {"id": f"{drawing.name}-description"})
    description.text = drawing.description
    root.insert(0, title)
    root.insert(1, description)
    root.set("role", "img")
    root.set("aria-labelledby", f"{drawing.name}-title {drawing.name}-description")
    return root


def _matplotlib_svg(drawing: Drawing) -> str:
    written = StringIO()
    with rc_context(_SETTINGS), warnings.catch_warnings():
        # The layout uses DejaVu Sans, which lacks the letters of some languages; readers' fonts
        # have them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # Without the date, so that the same runs give the same bytes.
        drawing.figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _remove(element: ElementTree.Element, tags: set[str]) -> None:
    """Removes the elements with these tags below `element`, and white space between elements."""
    element.tail = None
    if element.text is not None and not element.text.strip():
        element.text = None
    for child in list(element):
        if child.tag.rpartition("}")[2] in tags:
            element.remove(child)
        else:
            _remove(child, tags)


def _clean(element: ElementTree.Element) -> None:
    """Plain names, variables for colours, and the class and tooltip of a `tagged` artist."""
    element.tag = element.tag.rpartition("}")[2]
    attributes = element.attrib
    # The paths that these name are removed.
    attributes.pop("clip-path", None)
    if _HREF in attributes:
        attributes["href"] = attributes.pop(_HREF)
    if "style" in attributes:
        attributes["style"] = _COLOR.sub(_variable, attributes["style"])
    if element.tag != "g" or "id" not in attributes:
        return
    kind, is_tagged, tooltip = attributes.pop("id").partition("|")
    if is_tagged:
        attributes["class"] = kind
    if tooltip:
        title = ElementTree.Element("title")
        title.text = tooltip
        element.insert(0, title)


def _inline_markers(root: ElementTree.Element) -> None:
    """Draws each marker where it is used, without ids, which would repeat on a page."""
    shapes: dict[str, str] = {}
    for definitions in root.iter("defs"):
        for path in definitions:
            shapes[path.attrib["id"]] = path.attrib["d"]
    for use in root.iter("use"):
        attributes = use.attrib
        use.tag = "path"
        attributes["d"] = shapes[attributes.pop("href")[1:]]
        attributes["transform"] = f"translate({attributes.pop('x')} {attributes.pop('y')})"


def _variable(found: re.Match[str]) -> str:
    return _VARIABLES.get(found[0], found[0])
