"""Fits the gate of a finished run: states of the base on new and other text, a logistic probe, its record."""
