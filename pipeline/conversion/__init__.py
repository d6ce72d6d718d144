"""From a DeepSpeed checkpoint of any layout to a Hugging Face folder, verified against the model that trained.

The names of the formats are here, where a command line can read them without loading torch.
"""

from __future__ import annotations

from typing import Literal

Exported = Literal["stock", "scale", "peft", "expansion"]
Format = Literal["auto", Exported]
Precision = Literal["fp32", "bf16", "fp16"]
ServedPrecision = Literal["fp32", "bf16", "fp16", "fp8", "nf4", "q8_0"]
"""Types of weights; 8 bits with a scale for each row of a linear map; QLoRA's 4 bits; GGUF's 8 bits, which embeddings
have too, and which leave rows that do not divide in fp16."""
