"""The report: what runs learned and forgot, as one HTML page with figures, and as SVG files."""
