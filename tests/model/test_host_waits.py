"""The host runs ahead of a GPU: nothing in a step may make it wait there.

The meta device stands for the GPU. It computes nothing, has no value to look at (`.item()` is an
error on it), and a copy from the host or to it is seen.
"""

from __future__ import annotations

import pytest
import torch

from pipeline.methods.registry import method_for
from pipeline.model.attention import Documents
from pipeline.parallel.topology import SINGLE
from pipeline.training.batches import MicroBatch
from pipeline.training.step_totals import StepSums
from tests.widened import METHODS, SEED, Watched

META = torch.device("meta")


@pytest.fixture
def crossings():
    """Records, while entered, every operation on tensors of two devices."""
    seen: list[str] = []

    def look(operation, taken, made):
        if len({tensor.device for tensor in (*taken, *made)}) > 1:
            seen.append(str(operation))

    return Watched(look), seen


def micro_batch(model, sums, documents):
    """A micro-batch as `training.step` computes it."""
    batch = torch.zeros(2, 24, dtype=torch.long, device=META)
    ends = torch.zeros(3, dtype=torch.int32, device=META)
    losses = model(batch, batch, batch, Documents(batch, ends, (1, 1)) if documents else None)
    losses.total.backward()
    sums.add(losses, MicroBatch(batch, batch, batch, None))


def test_a_copy_is_seen(crossings):
    watch, seen = crossings
    with watch:
        torch.ones(2).to(META)
    assert seen == ["aten._to_copy.default"]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((method, "llama") for method in METHODS),
        *(("adapt", name) for name in ("neox", "phi3", "gemma3")),
    ],
)
def test_only_the_first_micro_batch_sends_anything(base, tmp_path, crossings, method, name):
    spec, (watch, seen) = base(name).spec, crossings
    with META:
        model = method_for(METHODS[method], tmp_path, SEED).build(spec, SINGLE, "none")
    sums = StepSums(META)
    for documents in (False, True):
        micro_batch(model, sums, documents)
        with watch:
            micro_batch(model, sums, documents)
        assert seen == []
