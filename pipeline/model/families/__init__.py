"""The architectures that can be a base, a file each: docs/architectures.md says how to add one."""

from __future__ import annotations

from pipeline.model.families.exaone4 import EXAONE4
from pipeline.model.families.family import Family, FusedPart, HfTensor, UnsupportedError, fuse, map_rows
from pipeline.model.families.gemma3 import GEMMA3
from pipeline.model.families.gpt_neox import GPT_NEOX
from pipeline.model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3
from pipeline.model.families.olmo2 import OLMO2
from pipeline.model.families.phi3 import PHI3
from pipeline.model.spec import DecoderSpec

FAMILIES = {
    model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, PHI3, OLMO2, EXAONE4, GEMMA3, GPT_NEOX)
    for model_type in family.model_types
}
"""By the `model_type` of config.json."""


def family_of(spec: DecoderSpec) -> Family:
    """The family of an architecture."""
    return FAMILIES[spec.family]


def hf_tensor(name: str, spec: DecoderSpec) -> HfTensor:
    """The tensor of a Hugging Face folder that holds the base parameter `name` (ours)."""
    return family_of(spec).tensor(name, spec)


__all__ = [
    "FAMILIES",
    "Family",
    "FusedPart",
    "HfTensor",
    "UnsupportedError",
    "family_of",
    "fuse",
    "hf_tensor",
    "map_rows",
]
