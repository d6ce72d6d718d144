"""From a DeepSpeed checkpoint of any layout to a Hugging Face folder, verified against the model
that trained.

The names of the formats are here, where a command line can read them without loading torch.
"""

from __future__ import annotations

from typing import Literal

from pipeline.hf import Exported

Format = Literal["auto", Exported]
Precision = Literal["fp32", "bf16", "fp16"]
Purpose = Literal["serving", "training"]
"""What a merged export of a widened model is for: other tools cannot train one that is stored for
serving in fp32.
"""
