"""How figures look: the colours of light and dark pages, and the marks of methods."""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1d1f22",
    "soft": "#5c6168",
    "faint": "#dcddd8",
    "accent": "#0b5f8a",
    "style-0": "#c4500b",
    "style-1": "#0072b2",
    "style-2": "#b65a94",
    "style-3": "#7a6a00",
    "style-4": "#008563",
    "style-5": "#2f8fc4",
    "style-6": "#3b3f45",
}
"""Colours on a light page, by the names of CSS variables. Figures are drawn with them."""
DARK = {
    "paper": "#16181b",
    "ink": "#e8e6e1",
    "soft": "#a3a6a8",
    "faint": "#34383d",
    "accent": "#7cc4ea",
    "style-0": "#ee7f3d",
    "style-1": "#4aa3e0",
    "style-2": "#d98fbd",
    "style-3": "#d9c74a",
    "style-4": "#2fb98f",
    "style-5": "#8accf0",
    "style-6": "#c9ccd0",
}
"""The same colours on a dark page."""

PAPER = LIGHT["paper"]
INK = LIGHT["ink"]
SOFT = LIGHT["soft"]
FAINT = LIGHT["faint"]

TICK_SIZE = 11.5
"""Font sizes are in CSS pixels."""
AXIS_SIZE = 12.5
LABEL_SIZE = 13.0
LINE_LABEL_SIZE = 12.5

# matplotlib's markers, with sizes in pixels at which all look about equally large.
_MARKERS = (("o", 10.4), ("s", 9.4), ("^", 11.4), ("D", 9.0), ("v", 11.4), (">", 11.4), ("h", 11.6))


def color_of(style: int) -> str:
    """The colour of the `style`-th group."""
    return LIGHT[f"style-{style % len(_MARKERS)}"]


def marker_of(style: int) -> tuple[str, float]:
    """The marker of the `style`-th group and its size; it differs from others of its colour."""
    return _MARKERS[(style + style // len(_MARKERS)) % len(_MARKERS)]
