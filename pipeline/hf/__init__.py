"""Everything that writes Hugging Face folders, or loads one as users do."""

from __future__ import annotations

from typing import Literal

Exported = Literal["merged", "scale", "difference", "expansion", "peft"]
"""What an exported folder holds. `pipeline.conversion` says what each is."""
