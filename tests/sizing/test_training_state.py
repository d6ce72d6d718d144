"""What training holds of each trained parameter: the price of a method."""

from __future__ import annotations

import pytest
import torch

from pipeline.sizing.parameters import Parameters
from pipeline.sizing.training_state import training_state_bytes


@pytest.mark.parametrize(
    ("dtype", "moments", "each"),
    [
        (torch.bfloat16, 2000, 16),
        (torch.bfloat16, 1000, 12),
        (torch.bfloat16, 1500, 14),
        (torch.bfloat16, 0, 8),
        (torch.float32, 2000, 20),
    ],
)
def test_bytes_of_a_trained_parameter(dtype, moments, each):
    parameters = Parameters(base=2000, expansion=0, trained=1000, active=2000, moments=moments)
    assert training_state_bytes(parameters, dtype) == 1000 * each
