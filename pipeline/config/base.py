"""The settings of the pretrained model: how it is stored, and its extended vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.config.reading import Section

BaseCode = Literal["native", "transformers"]
BasePrecision = Literal["bf16", "fp8", "nf4"]
Fp8Scaling = Literal["tensor", "row"]
GradientPrecision = Literal["e4m3", "e5m2", "bf16"]


class Fp8Settings(Section):
    """How a base in fp8 is stored and multiplied. Without `base_precision: fp8` nothing reads
    this."""

    scaling: Fp8Scaling = "tensor"
    """what shares a scale in a matrix of the base: all of it (tensor), or each row (row)"""
    gradient: GradientPrecision = "e5m2"
    """how the gradient of a frozen product's input is computed: in fp8 with gradients in e4m3 or
    e5m2, or in bf16 with the decoded matrix. Only runs in bf16 compute in fp8"""
    skip_small: bool = True
    """whether matrices with one side up to 1,024 and the other up to 4,096 are multiplied in bf16,
    which is faster on an H100"""


class VocabularySettings(Section):
    """An extended tokenizer (scale-cpt vocabulary), whose new tokens get rows
    (docs/vocabulary.md)."""

    folder: Path
    """folder that scale-cpt vocabulary wrote"""
    initial: Literal["mean", "last-weighted", "zero"] = "mean"
    """first embedding row of a new token: the mean of the rows of the base's tokens that spell it,
    the mean with weights 1, 2, 3, … (last-weighted), or zero"""
