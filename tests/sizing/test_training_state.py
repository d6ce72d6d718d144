"""What training holds of each trained parameter: the price of a method."""

from __future__ import annotations

import pytest
import torch

from pipeline.sizing.parameters import Parameters
from pipeline.sizing.training_state import training_state_bytes


@pytest.mark.parametrize(
    ("dtype", "by_muon", "each"),
    [
        (torch.bfloat16, 0, 16),
        (torch.bfloat16, 1000, 12),
        (torch.bfloat16, 500, 14),
        (torch.float32, 0, 20),
    ],
)
def test_bytes_of_a_trained_parameter(dtype, by_muon, each):
    parameters = Parameters(base=2000, expansion=0, trained=1000, active=2000, by_muon=by_muon)
    assert training_state_bytes(parameters, dtype) == 1000 * each
