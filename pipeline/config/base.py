"""The settings of the pretrained model: how it is stored, and its extended vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.config.reading import Section

BaseCode = Literal["native", "transformers"]
BasePrecision = Literal["bf16", "fp8", "nf4"]
Fp8Scaling = Literal["tensor", "row"]
"""What shares a scale in a matrix in fp8: all elements, or those of a row."""
GradientPrecision = Literal["e4m3", "e5m2", "bf16"]
"""How the product with a gradient is computed: in one of the types of fp8, or in bf16 with the
decoded matrix."""


class Fp8Settings(Section):
    """How a base in fp8 is stored and multiplied. These settings need `base_precision: fp8`."""

    scaling: Fp8Scaling = "tensor"
    """elements that share a scale: of a matrix (tensor), or of each row"""
    gradient: GradientPrecision = "e5m2"
    """type of the gradient in products with frozen matrices; bf16 takes the decoded matrix. Only
    runs in bf16 compute in fp8"""
    skip_small: bool = True
    """multiplies matrices of at most 1,024 by 4,096 in bf16, faster on an H100"""


class VocabularySettings(Section):
    """A tokenizer with more tokens than the base's, by scale-cpt vocabulary (docs/vocabulary.md).

    The rows of its new tokens train.
    """

    folder: Path
    """what scale-cpt vocabulary wrote"""
    initial: Literal["mean", "last-weighted", "zero"] = "mean"
    """a new token's first embedding row: the mean of the rows of the tokens that spell it, that
    mean with weights 1, 2, 3, …, or zeros"""
