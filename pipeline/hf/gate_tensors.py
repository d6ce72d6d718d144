"""The tensors of a gate, as exports hold them beside the weights."""

from __future__ import annotations

from functools import partial

import torch

from pipeline.gating.gate import FittedGate
from pipeline.hf.write import PlannedTensor


def gate_tensors(gate: FittedGate, vocab_size: int) -> list[PlannedTensor]:
    """The tensors of the gate of a base with so many tokens."""
    tensors = []
    for name, tensor in gate.tensors.items():
        # In fp32 whatever the rest is: 16 bits would change decisions.
        make = partial(torch.clone, tensor)
        shape = tuple(tensor.shape)
        tensors.append(PlannedTensor(f"token_gate.{name}", shape, make, torch.float32))
    if gate.open_ids:
        is_open_id = torch.zeros(vocab_size, dtype=torch.bool)
        is_open_id[list(gate.open_ids)] = True
        make = partial(torch.clone, is_open_id)
        tensors.append(PlannedTensor("token_gate.is_open_id", (vocab_size,), make, torch.bool))
    return tensors
