"""A model's loss in two passes over its logits, as GPUs compute it, against that by single
operations."""

from __future__ import annotations

import pytest
import torch

from pipeline.model import chunked_loss, output
from pipeline.parallel import fused_cross_entropy
from tests.model.test_new_tokens import batch_with_new_tokens, extended
from tests.model.test_new_tokens import model_of as model_with_new_tokens
from tests.model.test_reference import model_beside_base
from tests.tolerances import PARITY, assert_near
from tests.widened import Watched, some_batch, trained_gradients


def losses_and_gradients(model, batch, *, compiled, kl_sequences=0):
    model.zero_grad()
    model.output.compile_loss = compiled
    losses = model(*batch, kl_sequences=kl_sequences, reference_sequences=kl_sequences)
    losses.total.backward()
    return losses, trained_gradients(model)


def check_both_ways_agree(model, batch, kl_sequences=0, tolerance=PARITY):
    expected, expected_gradients = losses_and_gradients(
        model, batch, compiled=False, kl_sequences=kl_sequences
    )
    found, gradients = losses_and_gradients(model, batch, compiled=True, kl_sequences=kl_sequences)
    assert_near(found.nll, expected.nll, tolerance)
    assert_near(found.kl, expected.kl, tolerance)
    assert_near(found.total, expected.total, tolerance)
    assert found.kl.any() == bool(kl_sequences)
    assert gradients
    for name, gradient in gradients.items():
        assert expected_gradients[name].any(), f"{name} is not reached"
        assert_near(gradient, expected_gradients[name], tolerance, name)


@pytest.fixture
def calls(monkeypatch):
    """Runs the passes without a compiler, and collects the names of those that ran."""
    names = []

    def uncompiled(function):
        names.append(function.__name__)
        return function

    monkeypatch.setattr(fused_cross_entropy, "_compiled", uncompiled)
    return names


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((method, "llama") for method in ("preserve", "adapt", "route", "fft", "lora")),
        ("adapt", "gemma2"),
        ("preserve", "neox tied"),
    ],
)
def test_losses_and_gradients_are_those_of_single_operations(
    base, method, name, calls, monkeypatch
):
    model = model_beside_base(base(name), method)
    monkeypatch.setattr(output, "CHUNK_ELEMENTS", 37 * model.spec.vocab_size)
    batch = some_batch(model.spec, 3, 24)
    check_both_ways_agree(model, batch, kl_sequences=1)
    assert {"_nll_and_gradient", "_kl_and_gradient"} <= set(calls)


@pytest.mark.parametrize("method", ["adapt", "route"])
def test_so_are_those_with_new_tokens(base, method, tmp_path, calls):
    model = model_with_new_tokens(extended(base("llama")), method, tmp_path)
    check_both_ways_agree(model, batch_with_new_tokens(model))
    assert calls == ["_nll_and_gradient"]


def test_logits_of_two_products_are_never_summed_in_memory(base, calls, monkeypatch):
    """The passes get both products in the type of the weights."""
    model = model_beside_base(base("llama"), "adapt").bfloat16()
    given = []
    monkeypatch.setattr(
        fused_cross_entropy,
        "_nll_and_gradient",
        lambda logits, *rest: given.append(logits) or _passes(logits, *rest),
    )
    losses_and_gradients(model, some_batch(model.spec, 2, 24), compiled=True)
    (logits,) = given
    assert logits.of_x.dtype == logits.of_x_up.dtype == torch.bfloat16


_passes = fused_cross_entropy._nll_and_gradient


def test_the_meta_device_gets_sizes_alone_as_it_stands_for_a_gpu(base):
    model = model_beside_base(base("llama"), "adapt").bfloat16().to("meta")
    assert model.output.compiles_loss
    tokens = torch.zeros(2, 24, dtype=torch.long, device="meta")
    losses = model(tokens, tokens)
    losses.total.backward()
    assert losses.nll.shape == tokens.shape
    for name, gradient in trained_gradients(model).items():
        assert gradient.is_meta, name


def test_a_cpu_compiles_the_loss_only_where_a_run_asks_for_it(base, calls):
    model = model_beside_base(base("llama"), "adapt")
    batch = some_batch(model.spec, 2, 24)
    model(*batch)
    assert not calls
    model.output.compile_loss = True
    model(*batch)
    assert calls


def test_a_product_is_added_to_an_fp32_sum_in_one_operation_on_a_gpu():
    """On the meta device, which stands for one; rounding is that of the device."""
    total = torch.zeros(5, 3, device="meta")
    left = torch.zeros(5, 7, dtype=torch.bfloat16, device="meta")
    right = torch.zeros(7, 3, dtype=torch.bfloat16, device="meta")
    names = []
    with Watched(lambda operation, taken, made: names.append(str(operation))):
        chunked_loss.add_product_(total, left, right)
    assert names == ["aten.addmm.dtype_out"]


@pytest.mark.full
def test_compiled_passes_give_the_same_losses(base, monkeypatch):
    model = model_beside_base(base("gemma2"), "adapt")
    monkeypatch.setattr(output, "CHUNK_ELEMENTS", 37 * model.spec.vocab_size)
    check_both_ways_agree(model, some_batch(model.spec, 3, 24), kl_sequences=1)
