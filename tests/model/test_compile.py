"""Compiled layers: one graph a kind of layer, whatever the documents of a batch, and the same
results."""

from __future__ import annotations

import os
from typing import get_args

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.gpu_step.models import our_model
from pipeline.config.base import Fp8Scaling
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.quantized import Quantization, frozen_product
from pipeline.parallel.topology import SINGLE
from tests.distributed import all_ranks, run_ranks
from tests.model.test_tensor_parallel import OWN, Case
from tests.tolerances import assert_near, rounding_of
from tests.widened import (
    packed,
    scale_settings,
    some_batch,
    some_tokens,
    trained_gradients,
    widened,
)

pytestmark = pytest.mark.full

# Below `l_fp` and above it; Route's upper layers run twice, and Preserve's base stream has no
# gradient.
GRAPHS = {"preserve": 1, "route": 4, "adapt nf4": 3}
DOCUMENTS = [(64,), (10, 54), (20, 20, 24), (1,) * 64]


@pytest.fixture(autouse=True)
def dynamo(monkeypatch):
    """Tests run without torch.compile, which takes seconds to import."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def widened_model(base, method):
    variant, _, precision = method.partition(" ")
    return widened(base, scale_settings(variant), noise=0.1, precision=precision or None)


@pytest.mark.parametrize("scaling", get_args(Fp8Scaling))
def test_a_product_in_fp8_is_compiled_whole(scaling):
    """As on Hopper GPUs; torch computes it on a CPU, too."""
    quantization = Quantization("fp8", 32, 64, scaling, fp8_devices=("cpu",))
    stored = torch.empty(quantization.size, dtype=torch.uint8)
    quantization.write(stored, torch.randn(32, 64))
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
    plain, compiled = widened_model(opened, method), widened_model(opened, method)
    compiled.compile_layers(backend="aot_eager")
    for step, lengths in enumerate(DOCUMENTS):
        tokens = some_tokens(opened.spec, 1, sum(lengths), seed=step)
        batch = tokens, tokens, *packed(lengths)
        results = []
        for model in (plain, compiled):
            model.zero_grad()
            losses = model(*batch)
            losses.total.backward()
            results.append(
                (losses.total, *(own.grad for own in model.parameters() if own.grad is not None))
            )
        # Where a layer runs twice, its gradients may be added in another order.
        largest = max((own.abs().max() for own in results[0][1:]), key=float)
        for theirs, ours in zip(*results, strict=True):
            assert_near(ours, theirs, rounding_of(opened.spec, backward=True), scale=largest)
        assert len(results[0]) > 5
        assert counters["stats"]["unique_graphs"] == GRAPHS[method]


COUNTS = [(4,) * 16, (10, 54), (20, 20, 24), (64,), (1,) * 64, (5,) * 8 + (24,)]


@pytest.mark.parametrize("method", ["preserve", "adapt"])
def test_the_kernel_of_gpus_is_compiled_once_for_any_number_of_documents(method, base):
    """The meta device stands for a GPU: it takes the variable-length kernel, which gets as many
    numbers as the batch has documents. Its layers are compiled for the first batch alone."""
    meta = torch.device("meta")
    with meta, default_dtype(torch.bfloat16):
        model = our_model(method, base("stories260K").spec, 2)
    model.compile_layers(backend="aot_eager")
    graphs = []
    for lengths in COUNTS:
        tokens = torch.zeros(1, 64, dtype=torch.long, device=meta)
        positions, documents = packed(lengths)
        losses = model(
            tokens, tokens, positions.to(meta), documents.moved(lambda own: own.to(meta))
        )
        losses.total.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * len(COUNTS)
    assert graphs[0] > 0


FEATURES = [
    Case("llama", "fft"),
    Case("llama", "freeze", {"frozen_layers": 1}, new_tokens=True, uses_kl=True),
    Case("llama", "llama_pro", {"added_layers": 1}),
    Case("llama", "lora", {"rank": 4}, precision="fp8"),
    Case("llama", "adapt", {"norm": "base"}, "all"),
    Case("llama", "adapt", OWN, uses_kl=True),
    Case("llama", "adapt", {}, "all", kept_results="attention"),
    Case("neox", "route", {}, "collaborative", kept_results="products"),
    Case("llama", "adapt", {}, "all", precision="fp8", kept_results="products"),
    Case("llama", "adapt", OWN, "all", uses_kl=True, kept_results="products"),
]


def assert_compiles(case, plain, compiled):
    compiled.compile_layers(backend="aot_eager")
    batch, rows = some_batch(plain.spec, 2, 24), int(case.uses_kl)
    expected, found = (
        model(*batch, kl_sequences=rows, reference_sequences=rows) for model in (plain, compiled)
    )
    assert counters["stats"]["unique_graphs"] > 0
    bound = rounding_of(plain.spec, backward=True)
    for losses in (expected, found):
        losses.total.backward()
    assert_near(found.nll + found.kl, expected.nll + expected.kl, bound)
    gradients = trained_gradients(compiled)
    for name, gradient in trained_gradients(plain).items():
        assert_near(gradients[name], gradient, bound, name)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_every_feature_compiles(base, case):
    assert_compiles(case, *(case.build(base(case.base).path, SINGLE) for _ in range(2)))


def compiled_on_a_rank(path, cases):
    del os.environ["TORCHDYNAMO_DISABLE"]
    for case in cases:
        assert_compiles(case, *(case.build(path, all_ranks()) for _ in range(2)))


def test_ranks_compile(base):
    cases = [
        Case("llama", "adapt", sequence_parallel=sequence_parallel)
        for sequence_parallel in (False, True)
    ]
    cases.append(Case("llama", "adapt", {}, "all", kept_results="products"))
    run_ranks(compiled_on_a_rank, 2, base("llama").path, cases)
