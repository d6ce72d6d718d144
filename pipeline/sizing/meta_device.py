"""Code that runs on the meta device, where tensors have shapes and no data."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.errors import BaseModelError


class NotTracedError(BaseModelError):
    """The code of a base does not run without data, so that its costs are not known."""


def value_without_data(tensor: Tensor) -> bool | int | float:
    """The value that code gets for a meta tensor of one element.

    It is False for a bool. transformers asks whether a row holds one document only, and whether a
    mask hides nothing. With False it makes the mask, as it does for the packed rows of training.
    """
    if tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point:
        return 1.0
    return 1
