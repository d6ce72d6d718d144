"""Rotary position embedding: the table of angles that all layers of one kind share."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .scale_math import frequencies_by_length, rotary_table


class RotaryAngles(NamedTuple):
    """cos and sin of the rotary position embedding, [B, 1, S, R]; the first R channels of each head
    are rotated.

    A tuple, so that `device_map` moves it to the device of each layer.
    """

    cos: Tensor
    sin: Tensor


class ScaleRotary(nn.Module):
    """Makes the tables of one of the config's rotary embeddings.

    Frequencies are buffers: a copy from the host in every pass would make it wait, and cannot be
    captured in a CUDA graph. They are held as the bits of fp32 in integers, which casting the model
    leaves alone.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        for name in ("frequencies", "long_frequencies"):
            held = None
            if spec[name] is not None:
                held = torch.empty(len(spec[name]), dtype=torch.int32)
            self.register_buffer(name, held, persistent=False)
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Sets the buffers, which `from_pretrained` makes without values."""
        for name, held in self.named_buffers():
            # Their bits: floats made by `torch.tensor` have 16 bits under DeepSpeed's `zero.Init`.
            bits = array("i", array("f", self.spec[name]).tobytes())
            held.copy_(torch.tensor(bits.tolist(), dtype=torch.int32))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> RotaryAngles:
        """The table in `dtype` for positions [B, S]."""
        frequencies = self._held("frequencies", positions.device)
        context = self.spec["context"]
        if context is not None:
            lengths = positions.amax(-1, keepdim=True) + 1
            long_frequencies = self._held("long_frequencies", positions.device)
            frequencies = frequencies_by_length(lengths, context, frequencies, long_frequencies)
        cos, sin = rotary_table(frequencies, positions, self.spec["attention_factor"], dtype)
        return RotaryAngles(cos.unsqueeze(1), sin.unsqueeze(1))

    def _held(self, name: str, device: torch.device) -> Tensor:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            # A trace has no `view` of another type.
            return torch.tensor(self.spec[name], dtype=torch.float32, device=device)
        bits: Tensor = getattr(self, name)
        return bits.view(torch.float32).to(device)
