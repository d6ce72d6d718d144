"""From a DeepSpeed checkpoint of any layout to a Hugging Face folder, verified against the model that trained.

The names of the formats are here, where a command line can read them without loading torch.
"""

from __future__ import annotations

from typing import Literal

Exported = Literal["stock", "scale", "peft", "expansion"]
Format = Literal["auto", Exported]
Precision = Literal["fp32", "bf16", "fp16"]
ServedPrecision = Literal["fp32", "bf16", "fp16", "int8", "fp8", "fp8_tensor", "nf4", "q8_0", "q4_k"]
"""Types of weights; 8 bits with a scale for a row of a linear map (`int8`, `fp8`) or for the whole (`fp8_tensor`);
QLoRA's 4 bits; two of GGUF's formats, which embeddings have too, and which leave rows that do not divide in fp16."""
