"""What holds of every page: it is whole, loads nothing, runs nothing, and can be read out."""

from __future__ import annotations

import re
from html.parser import HTMLParser

STRANGE = ("<script>alert('x')</script>", '"><img src=x onerror=alert(1)> & Co', "]]></style>")
"""Names and texts that would be HTML if they were not escaped."""


class Parsed(HTMLParser):
    """A page's elements and texts; an element that is not closed in its place is a failure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"] and data.strip():
            self.texts.append(data.strip())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check(text: str) -> Parsed:
    """What holds of every report."""
    parsed = Parsed(text)
    assert not re.search(r"https?://|url\(|@import|xmlns", text)
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {
        "script",
        "link",
        "img",
        "image",
        "use",
        "iframe",
        "object",
        "embed",
        "foreignobject",
        "a",
    }
    ids = []
    coordinates = []
    for _, attributes in parsed.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), "a script"
            assert name not in ("src", "href", "xlink:href"), "something from elsewhere"
            if name == "id":
                ids.append(value)
            if name in ("d", "points", "x", "y"):
                coordinates.append(value)
    assert len(ids) == len(set(ids))
    for drawing in parsed.of("svg"):
        if drawing.get("aria-hidden") != "true":
            assert drawing["role"] == "img"
            assert set(drawing["aria-labelledby"].split()) <= set(ids), "it has no name to read out"
    assert not re.search(r"\bnan\b|\binf\b", " ".join(parsed.texts))
    assert coordinates
    for value in coordinates:
        assert "nan" not in value
        assert "inf" not in value
    return parsed
