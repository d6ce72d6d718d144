"""What a checkpoint can leave as; loads no torch."""

from __future__ import annotations

from typing import Literal

Format = Literal["auto", "stock", "scale", "peft", "expansion"]
Precision = Literal["fp32", "bf16", "fp16"]
