"""The time on a device, whose work may run behind the program."""

from __future__ import annotations

import time

import torch


def time_on(device: torch.device) -> float:
    """The time in seconds, once a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
