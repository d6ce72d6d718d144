"""The gate of a finished run: states of the base on new and other text, a probe, its record."""
