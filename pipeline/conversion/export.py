"""What a conversion is going to write: a list of tensors, each made when its turn comes, and a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the output: its shape is known beforehand, its values are read or fused by `make`."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass(frozen=True)
class FileNames:
    """What the files of a folder are called. `in_parts` says whether weights of many GiB lie in several."""

    weights: str
    config: str
    in_parts: bool


MODEL = FileNames("model.safetensors", "config.json", in_parts=True)
ADAPTER = FileNames("adapter_model.safetensors", "adapter_config.json", in_parts=False)


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder to be written.

    Attributes:
        format: `stock`, `scale` or `peft`.
        config: the contents of the configuration.
        tensors: in the order in which they are written.
        dtype: what they are written in.
        code: files of Python that the folder carries, by name.
        files: what weights and configuration are called.
    """

    format: str
    config: Mapping[str, Any]
    tensors: Sequence[PlannedTensor]
    dtype: torch.dtype
    code: Mapping[str, str] = field(default_factory=dict)
    files: FileNames = MODEL
