"""The folder of a hosted base, whose weights transformers reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from pipeline.errors import BaseModelError
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.tied_weights import check_loaded_ties, stored_ties, untied_fault
from pipeline.extensions.hosted.transformers_model import load_whole_base
from pipeline.model.base_folder import BaseFolder, opened_file

_TYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_ROWS = 2**13
_CODES = ("F8_E4M3", "F8_E5M2", "I8")
"""Types of safetensors that hold codes, in a folder whose weights are in fp8; I8: two of 4 bits."""


class _Stored(NamedTuple):
    """A tensor of a file: its type as safetensors calls it, and its number of elements."""

    name: str
    dtype: str
    size: int


@dataclass(frozen=True)
class HostedFolder(BaseFolder):
    """A hosted base's folder. transformers reads its weights, all at once: only it knows how the
    tensors of the files become parameters."""

    spec: HostedSpec

    @property
    def is_read_whole(self) -> bool:
        return True

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that the base was published in: that of its largest tensor."""
        largest = 0
        found = "F32"
        for stored in self._stored():
            if stored.size > largest and stored.dtype in _TYPES:
                largest = stored.size
                found = stored.dtype
        return _TYPES[found]

    def whole(self, dtype: torch.dtype) -> nn.Module:
        """The base as transformers loads it, on the CPU.

        Raises:
            BaseModelError: transformers cannot load it, or would read other weights than its own.
        """
        _ = self.file_of  # refuses a folder from which transformers would read other weights
        self.check_tie()
        if self.spec.quantization == "FP8":
            self._check_scales()
        loaded = load_whole_base(self.path, self.spec, dtype)
        check_loaded_ties(loaded, self.path)
        return loaded

    def check_tie(self) -> None:
        """Checks that tensors of the files are equal where config.json ties their parameters.

        transformers uses what the files hold.

        Raises:
            BaseModelError: two of them differ, or a file is damaged.
        """
        for first, *others in stored_ties(self.spec, self.file_of):
            for other in others:
                if not self._is_equal(first, other):
                    raise BaseModelError(f"{self.file_of[other]}: {untied_fault(first, other)}")

    def _is_equal(self, first: str, second: str) -> bool:
        """Whether two stored tensors have the same shape and values."""
        with (
            opened_file(self.file_of[first]) as one,
            opened_file(self.file_of[second]) as other,
        ):
            a = one.get_slice(first)
            b = other.get_slice(second)
            if a.get_shape() != b.get_shape():
                return False
            # By parts: both may be gigabytes. In one type: the wider one holds both exactly.
            for start in range(0, a.get_shape()[0], _ROWS):
                rows = slice(start, start + _ROWS)
                if not torch.equal(a[rows].double(), b[rows].double()):
                    return False
        return True

    def _check_scales(self) -> None:
        """Checks that each matrix in fp8 has its scale, under a name that transformers reads.

        Without one transformers takes the codes for the values, and says nothing.

        Raises:
            BaseModelError: a matrix has none.
        """
        for stored in self._stored():
            if stored.dtype not in _CODES:
                continue
            stem = stored.name.removesuffix("weight")
            # As transformers' `Fp8Dequantize` pairs them, and FineGrainedFP8HfQuantizer renames.
            scales = {f"{stored.name}_scale_inv", f"{stem}scale", f"{stem}qscale_weight"}
            if scales.isdisjoint(self.file_of):
                raise BaseModelError(
                    f"{self.file_of[stored.name]}: {stored.name} is in fp8: expected its scale, "
                    f"{stored.name}_scale_inv, found none that transformers reads; copy the folder "
                    "again, or use the original model"
                )

    def _stored(self) -> Iterator[_Stored]:
        """All tensors of the files."""
        names_of: dict[Path, list[str]] = defaultdict(list)
        for name, file in self.file_of.items():
            names_of[file].append(name)
        for file, names in names_of.items():
            with safe_open(file, framework="pt") as tensors:
                for name in names:
                    view = tensors.get_slice(name)
                    size = torch.Size(view.get_shape()).numel()
                    yield _Stored(name, view.get_dtype(), size)
