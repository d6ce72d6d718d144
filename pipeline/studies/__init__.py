"""Studies: runs on one base that differ in method, learning rate and seed; their results; a search; the report."""
