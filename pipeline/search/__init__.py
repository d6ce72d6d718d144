"""A search for the expansion that learns most within a forgetting budget, by rounds of short probes."""
