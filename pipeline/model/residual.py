"""The residual stream of a base that was widened before, as an ordinary model's folder stores it.

Such a folder (`conversion.stock`) holds what an earlier expansion added to the residual stream times a small power of
two, so that an ordinary RMSNorm does not feel it. That is well for running it and ruinous for training it: AdamW's
steps are as long for a weight of 10⁻⁸ as for one of 10⁻². So the weights are read at their own size, which a power of
two gives back exactly, and the norms leave those channels out of their mean square, which is what the scale was for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# 2^-20 leaves 2^-40 of their square in the mean square. Half precision has five bits of exponent: there 2^-6, which
# keeps the scaled weights normal numbers and the error below its own rounding.
_SCALE_EXPONENT = {torch.float32: 20, torch.bfloat16: 20, torch.float16: 6}
_WRITTEN_TO = (
    "attention.output.base.weight",
    "attention.output.base.bias",
    "ffn.down.base.weight",
    "ffn.down.base.bias",
)


def scale_in(dtype: torch.dtype) -> float:
    """What a folder of `dtype` stores the added channels times."""
    return 2.0 ** -_SCALE_EXPONENT[dtype]


@dataclass(frozen=True)
class StoredResidual:
    """The channels from `normed_size` on are stored times `scale`, a power of two, and count in no norm."""

    normed_size: int
    scale: float

    def store(self, name: str, values: Tensor) -> Tensor:
        """The base parameter `name` (ours) as the folder holds it; changes `values`."""
        return self._times(name, values, self.scale, first_row=0)

    def restore(self, name: str, stored: Tensor, first_row: int = 0) -> Tensor:
        """The inverse, for the rows from `first_row` on; changes `stored`."""
        return self._times(name, stored, 1 / self.scale, first_row)

    def _times(self, name: str, values: Tensor, factor: float, first_row: int) -> Tensor:
        if name == "embedding.base.weight":
            values[:, self.normed_size :] *= factor
        elif name.endswith(_WRITTEN_TO):
            values[max(0, self.normed_size - first_row) :] *= factor
        elif name.endswith("norm.base.weight"):  # a gain takes back what the stream was scaled by
            values[max(0, self.normed_size - first_row) :] /= factor
        return values
