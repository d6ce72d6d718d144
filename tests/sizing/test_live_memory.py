"""The memory of live tensors is counted by storage."""

from __future__ import annotations

import torch

from pipeline.sizing.live_memory import LiveMemory


def test_live_memory_counts_each_storage_once_until_it_is_freed():
    before = torch.ones(100)
    with LiveMemory(before) as live:
        first = torch.ones(1000)
        view = first[:10].view(2, 5)
        before.add_(1)
        assert live.now == 4000
        second = first + 1
        assert live.now == live.peak == 8000
        del first
        assert live.now == 8000  # the view holds it
        del view, second
        assert live.now == 0
