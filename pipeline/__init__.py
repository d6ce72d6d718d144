"""Continual pretraining by widening a frozen decoder."""

__version__ = "0.2.0"
