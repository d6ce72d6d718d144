"""The host runs ahead of a GPU: nothing in a step may make it wait there.

The meta device stands for the GPU. It computes nothing, has no value to look at (`.item()` is an error on it), and a
copy from the host or to it is seen.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.config.method import FullFineTuning, LlamaPro, Lora
from pipeline.methods import method_for
from pipeline.model.attention import Documents
from pipeline.parallel.topology import SINGLE
from pipeline.training.loop import StepSums
from tests.widened import SEED, scale_settings

META = torch.device("meta")
METHODS = {
    "fft": FullFineTuning(name="fft"),
    "lora": Lora(name="lora", rank=2),
    "llama_pro": LlamaPro(name="llama_pro", added_layers=1),
    "preserve": scale_settings("preserve"),
    "adapt": scale_settings("adapt"),
    "route": scale_settings("route", norm="base"),
}


class Crossings(TorchDispatchMode):
    """Records, while entered, every operation on tensors of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
        if len({tensor.device for tensor in tensors}) > 1:
            self.seen.append(str(operation))
        return result


def micro_batch(model, sums, documents):
    """A micro-batch as `training.step` computes it."""
    batch = torch.zeros(2, 24, dtype=torch.long, device=META)
    ends = torch.zeros(3, dtype=torch.int32, device=META)
    losses = model(batch, batch, batch, Documents(batch, ends, (1, 1)) if documents else None)
    losses.total.backward()
    sums.add(losses, batch, 0)


def test_a_copy_is_seen():
    with Crossings() as crossings:
        torch.ones(2).to(META)
    assert crossings.seen == ["aten._to_copy.default"]


@pytest.mark.parametrize(
    ("method", "name"),
    [*((method, "llama") for method in METHODS), *(("adapt", name) for name in ("neox", "llama dynamic", "gemma3"))],
)
def test_only_the_first_micro_batch_sends_anything(base, tmp_path, method, name):
    spec = base(name).spec
    with META:
        model = method_for(METHODS[method], tmp_path, SEED).build(spec, SINGLE, "none")
    sums = StepSums(META)
    for documents in (False, True):
        micro_batch(model, sums, documents)
        with Crossings() as crossings:
            micro_batch(model, sums, documents)
        assert crossings.seen == []
