"""Compiled layers: one graph a kind of layer, whatever the documents of a batch, and the same results."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.model.attention import Documents
from pipeline.parallel.quantized import Quantization, frozen_product
from tests.tolerances import assert_near, rounding_of
from tests.widened import scale_settings, some_tokens, widened

# Below `l_fp` and above it; Route's upper layers run twice, and Preserve's base stream has no gradient.
GRAPHS = {"preserve": 1, "route": 4, "adapt nf4": 3}
DOCUMENTS = [(64,), (10, 54), (20, 20, 24), (1,) * 64]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def dynamo(monkeypatch):
    """Tests run without torch.compile, which takes seconds to import."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def packed(spec, lengths, seed):
    tokens = some_tokens(spec, 1, sum(lengths), seed=seed)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    ids = torch.cat([torch.full((length,), at) for at, length in enumerate(lengths)]).unsqueeze(0)
    return tokens, tokens, positions, Documents.of(ids)


def model_of(base, method):
    variant, _, precision = method.partition(" ")
    return widened(base, scale_settings(variant), noise=0.1, precision=precision or None)


def test_a_product_in_fp8_is_compiled_whole():
    """As on Hopper GPUs; torch computes it on a CPU, too."""
    quantization = Quantization("fp8", 32, 64, fp8_device="cpu")
    stored = torch.empty(quantization.size, dtype=torch.uint8)
    quantization.write(stored, lambda rows: torch.randn(32, 64)[slice(*rows)])
    compiled = torch.compile(frozen_product, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for product in (frozen_product, compiled):
        y = product(x, stored, quantization, None)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("method", GRAPHS)
def test_layers_are_compiled_once_for_all_batches(base, method):
    """`fullgraph` makes a graph break an error. This backend uses the kernels of eager mode."""
    opened = base("stories260K")
    plain, compiled = model_of(opened, method), model_of(opened, method)
    compiled.compile_layers(backend="aot_eager")
    for step, lengths in enumerate(DOCUMENTS):
        batch = packed(opened.spec, lengths, step)
        results = []
        for model in (plain, compiled):
            model.zero_grad()
            losses = model(*batch)
            losses.total.backward()
            results.append((losses.total, *(own.grad for own in model.parameters() if own.grad is not None)))
        # Where a layer runs twice, its gradients may be added in another order.
        largest = max((own.abs().max() for own in results[0][1:]), key=float)
        for theirs, ours in zip(*results, strict=True):
            assert_near(ours, theirs, rounding_of(opened.spec, backward=True), scale=largest)
        assert len(results[0]) > 5
        assert counters["stats"]["unique_graphs"] == GRAPHS[method]
