"""The variants of the benchmark: a method, and the ways in which it may run."""

from __future__ import annotations

from typing import NamedTuple, get_args

from pipeline.config.base import BasePrecision
from pipeline.parallel.quantized import QuantizedPrecision

OURS = ("fft", "lora", "llama_pro", "preserve", "adapt", "adapt_own", "adapt_low_rank", "route")
THEIRS = ("transformers_fft", "peft_lora", "peft_lora_16")
QUANTIZATIONS = get_args(QuantizedPrecision)
QUANTIZED = ("preserve", "adapt", "lora")
"""Methods that are also measured with a base in 8 and in 4 bits: their base is frozen."""
COMPILED = ("adapt", "preserve", "fft", "transformers_fft", "peft_lora", "route", "lora")
"""Methods that are also measured with compiled layers, from what matters most."""


class Variant(NamedTuple):
    """What is measured.

    Attributes:
        method: one of OURS or THEIRS.
        compiled: with compiled layers.
        liger: with the kernels of Liger (THEIRS).
        base: the form in which a frozen base is stored (OURS).
    """

    method: str
    compiled: bool = False
    liger: bool = False
    base: BasePrecision = "bf16"

    def __str__(self) -> str:
        """The name in the table, and of --variant: "adapt + nf4 + compile"."""
        parts = [self.method]
        if self.base != "bf16":
            parts.append(self.base)
        if self.compiled:
            parts.append("compile")
        if self.liger:
            parts.append("liger")
        return " + ".join(parts)


def all_variants(*, compiled: bool) -> list[Variant]:
    """Every variant, in the order of the table and of the turns."""
    variants: list[Variant] = []
    for method in (*OURS, *THEIRS):
        variants.append(Variant(method))
    for method in THEIRS:
        variants.append(Variant(method, liger=True))

    quantized: list[Variant] = []
    for base in QUANTIZATIONS:
        for method in QUANTIZED:
            quantized.append(Variant(method, base=base))
    variants += quantized

    if compiled:
        # Last: compiling takes minutes, and a limit of time leaves out what comes last.
        for method in COMPILED:
            variants.append(Variant(method, compiled=True))
        for variant in quantized:
            variants.append(variant._replace(compiled=True))
    return variants
