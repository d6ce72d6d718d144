"""What training holds of each parameter that trains."""

from __future__ import annotations

import torch

from pipeline.sizing.parameters import Parameters

MASTER = 4
"""Bytes of an element's fp32 master weight."""
MOMENT = 4
"""Bytes of an element's fp32 moment; `moments_of` an optimizer says how many there are."""


def optimizer_state_bytes(parameters: Parameters) -> int:
    """The fp32 master weights and the moments of what trains, over all ranks."""
    return parameters.trained * MASTER + parameters.moments * MOMENT


def training_state_bytes(parameters: Parameters, dtype: torch.dtype) -> int:
    """The bytes that training holds of the trained parameters, over all ranks.

    They are weights and gradients in `dtype`, and the optimizer's fp32 copies and moments: with 16
    bits 2 + 2 + 4 bytes a parameter, and 4 for each of its moments: AdamW has two, Muon one.
    """
    weights_and_gradients = 2 * parameters.trained * dtype.itemsize
    return weights_and_gradients + optimizer_state_bytes(parameters)
