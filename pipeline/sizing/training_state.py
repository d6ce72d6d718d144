"""What training holds of each parameter that trains."""

from __future__ import annotations

import torch

from pipeline.sizing.parameters import Parameters

MASTER_AND_MOMENTS = 12
"""Bytes of an element's fp32 master weight and two fp32 moments of Adam."""
MOMENT = 4
"""Bytes of an element's moment; Muon has one where Adam has two."""


def optimizer_state_bytes(parameters: Parameters) -> int:
    """The fp32 master weights and the moments of what trains, over all ranks."""
    return parameters.trained * MASTER_AND_MOMENTS - parameters.by_muon * MOMENT


def training_state_bytes(parameters: Parameters, dtype: torch.dtype) -> int:
    """The bytes that training holds of the trained parameters, over all ranks.

    They are weights and gradients in `dtype`, and the optimizer's fp32 copies and moments: with 16
    bits 2 + 2 + 12 bytes a parameter, and 4 fewer where Muon updates it.
    """
    weights_and_gradients = 2 * parameters.trained * dtype.itemsize
    return weights_and_gradients + optimizer_state_bytes(parameters)
