"""The report: what runs learned and forgot, as one HTML page with figures and tables, and as PNG files."""
