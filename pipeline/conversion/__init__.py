"""From a DeepSpeed checkpoint of any layout to a Hugging Face folder, verified against the model
that trained.

The names and options of the formats are here, where a command line can read them without loading
torch. The core's formats themselves are in `pipeline.conversion.core_formats`;
`pipeline.conversion.formats` loads them and those of extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

from pipeline.errors import ExtensionError
from pipeline.extension import OfferedFormat, extensions

AUTO = "auto"
"""In place of the name of a format: the first that can express the model."""
Precision = Literal["fp32", "bf16", "fp16"]
Purpose = Literal["serving", "training"]
"""What a merged export of a widened model is for: other tools cannot train one that is stored for
serving in fp32.
"""

_CORE = "pipeline.conversion.core_formats"


@cache
def offered_formats() -> Mapping[str, OfferedFormat]:
    """The formats of the core and of the installed extensions, by name.

    Raises:
        ExtensionError: an extension cannot be used, or has a format of a name that is there.
    """
    formats = {
        "merged": OfferedFormat("a model of the base's own class", f"{_CORE}:MERGED"),
        "scale": OfferedFormat("the tensors as they were trained, with code", f"{_CORE}:SCALE"),
    }
    for extension in extensions():
        for name, offered in extension.export_formats().items():
            if name in formats or name in ("expansion", "peft", AUTO):
                raise ExtensionError(
                    f"extension {extension.name}: its export format {name} is there already; give "
                    "it another name"
                )
            formats[name] = offered
    formats["expansion"] = OfferedFormat("what SCALE added to the base", f"{_CORE}:EXPANSION")
    formats["peft"] = OfferedFormat("the adapters of LoRA, as PEFT loads them", f"{_CORE}:PEFT")
    return formats
