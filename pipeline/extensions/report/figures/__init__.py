"""Figures by matplotlib, as SVG whose text is text and whose colours are the page's."""
