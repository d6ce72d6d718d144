"""Experiments with the product, apart from it: studies, their reports, and their texts."""
