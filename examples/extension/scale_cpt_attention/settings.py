"""The section `method` of a run that trains attention alone."""

from __future__ import annotations

from typing import Literal

from pipeline.config.method import MethodSettings
from pipeline.config.reading import NonNegativeInt


class AttentionOnly(MethodSettings):
    """Full fine-tuning of the attention maps alone (Touvron et al. 2022, "Three things everyone
    should know about Vision Transformers")."""

    title = "attention only"
    keeps_base = False

    name: Literal["attention"]
    first_layer: NonNegativeInt = 0
    """first layer whose attention maps train"""
