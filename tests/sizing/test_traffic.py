"""ZeRO-3's gathers in cases with a known answer; test_against_runs.py compares them with real runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from pipeline.sizing.micro_batch import MicroBatchCosts
from pipeline.sizing.traffic import Gathering, estimate_gathering
from pipeline.sizing.zero import ZeroSettings

LIMITS = {
    "prefetch_bucket_size": 0,
    "param_persistence_threshold": 0,
    "max_live_parameters": 26,
    "max_reuse_distance": 0,
}
TIGHT = ZeroSettings(3, *[torch.bfloat16] * 3, **LIMITS)
SIZES = (10, 20, 30, 5)


@pytest.mark.parametrize(
    ("returning", "changes", "expected"),
    [
        ((), {}, Gathering(65, 30)),  # no backward pass
        (SIZES, {}, Gathering(130, 30)),  # each use gathers
        (SIZES, {"max_reuse_distance": 130}, Gathering(65, 65)),  # all stay
        (SIZES, {"prefetch_bucket_size": 1}, Gathering(65 + 39, 56)),  # 26 of 65 stay
        ((10, 30), {"prefetch_bucket_size": 1}, Gathering(65 + 24, 56)),
        (SIZES, {"prefetch_bucket_size": 1, "max_live_parameters": 1000}, Gathering(65, 65)),
        (SIZES, {"param_persistence_threshold": 10}, Gathering(100, 30)),  # small ones are never gathered
        (SIZES, {"param_persistence_threshold": 100}, Gathering(0, 0)),
    ],
)
def test_what_is_gathered_again_for_the_backward_pass(returning, changes, expected):
    costs = MicroBatchCosts(0, 0, 0, Counter(), SIZES, (), returning, (), 0)
    assert estimate_gathering(costs, replace(TIGHT, **changes)) == expected
    recomputed = estimate_gathering(replace(costs, recomputed_sizes=(20,)), replace(TIGHT, **changes))
    assert recomputed.total - expected.total == (20 if expected.total else 0)
