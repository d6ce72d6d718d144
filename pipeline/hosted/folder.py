"""The folder of a hosted base, whose weights transformers reads."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from pipeline.hosted.spec import HostedSpec
from pipeline.hosted.transformers_model import load_whole_base
from pipeline.model.base_folder import BaseFolder

_TYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class HostedFolder(BaseFolder):
    """A hosted base's folder. transformers reads its weights, all at once: only it knows how the
    tensors of the files become parameters."""

    spec: HostedSpec

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that the base was published in: that of its largest tensor."""
        names_of: dict[Path, list[str]] = defaultdict(list)
        for name, file in self.file_of.items():
            names_of[file].append(name)
        largest = 0
        found = "F32"
        for file, names in names_of.items():
            with safe_open(file, framework="pt") as tensors:
                for name in names:
                    view = tensors.get_slice(name)
                    size = torch.Size(view.get_shape()).numel()
                    if size > largest and view.get_dtype() in _TYPES:
                        largest = size
                        found = view.get_dtype()
        return _TYPES[found]

    def whole(self, dtype: torch.dtype) -> nn.Module:
        """The base as transformers loads it, on the CPU."""
        _ = self.file_of  # refuses a folder from which transformers would read other weights
        return load_whole_base(self.path, self.spec, dtype)
