"""The ledger of a step's traffic: its bounds on our models, and an H100's measurements."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu_step.shapes import TINY
from benchmarks.gpu_step.variants import Variant
from benchmarks.ledger import __main__ as ledger
from benchmarks.ledger.fusion import fused
from benchmarks.ledger.prices import Prices, moved_bytes
from benchmarks.ledger.recorded_step import recorded
from benchmarks.ledger.tape import Operation, Tape
from benchmarks.results import ROOT
from pipeline.model import chunked_loss
from tests.benchmarks.calls import rows_of

SHAPE = TINY._replace(batch_size=4, sequence_length=128)
LOGITS = 4 * 128 * 512
MEASURED = ROOT / "docs" / "results" / "gpu" / "h100.json"


def loss_bytes(method, *, fused_loss=True):
    """The bytes that a step moves for each logit, beside those of the two products and of their
    gradients."""
    operations = recorded(Variant(method), SHAPE, chunk_elements=LOGITS // 2, fused_loss=fused_loss)
    total = 0
    for operation in operations:
        if operation.module == "output" and operation.kind == "pointwise":
            total += moved_bytes(operation)
    return total / LOGITS


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        # Each pass reads two products of 2 bytes, and the second one writes 2. What is left are
        # the gradients of weights and streams, and a number a token.
        ("adapt", 12),
        ("preserve", 11),
        # One product, and an fp32 gradient of the output's weights that is set to zero.
        ("fft", 8.5),
    ],
)
def test_the_loss_reads_its_products_twice_and_writes_one_gradient(method, bound):
    assert bound - 1 < loss_bytes(method) < bound
    assert loss_bytes(method, fused_loss=False) > 3 * bound


def test_one_more_pass_over_the_logits_breaks_the_bound(monkeypatch):
    add_gradients = chunked_loss.add_gradients

    def with_another_pass(gradients, inputs, rows, projected, logit_gradient):
        add_gradients(gradients, inputs, rows, projected, logit_gradient * 1.0)

    monkeypatch.setattr(chunked_loss, "add_gradients", with_another_pass)
    assert loss_bytes("adapt") > 13


@pytest.mark.parametrize(
    ("method", "kernels", "compiled_kernels"),
    [("preserve", 1010, 480), ("adapt", 1300, 620), ("fft", 670, 290)],
)
def test_a_step_starts_no_more_kernels_than_before(method, kernels, compiled_kernels):
    for is_compiled, bound in ((False, kernels), (True, compiled_kernels)):
        variant = Variant(method, compiled=is_compiled)
        operations = recorded(variant, SHAPE, chunk_elements=2**27)
        assert 0.8 * bound < len(operations) <= bound


def steps_beside_measured(folder, monkeypatch, wanted):
    """The rows of those of the H100's steps that `wanted` takes."""
    measured = json.loads(MEASURED.read_text())
    measured["steps"] = [step for step in measured["steps"] if wanted(step)]
    file = folder / "measured.json"
    file.write_text(json.dumps(measured))
    return rows_of(ledger, folder, monkeypatch, "--measured", file)


def check_within_15_percent(rows, count):
    assert len(rows) == count
    for row in rows:
        assert 0.85 < row["ratio"] < 1.15, row


def test_two_steps_of_an_h100_are_counted_within_15_percent(tmp_path, monkeypatch):
    rows = steps_beside_measured(
        tmp_path,
        monkeypatch,
        lambda step: step["variant"] in ("fft + compile", "transformers_fft + compile"),
    )
    check_within_15_percent(rows, 2)


@pytest.mark.full
def test_all_steps_of_an_h100_are_counted_within_15_percent(tmp_path, monkeypatch):
    check_within_15_percent(steps_beside_measured(tmp_path, monkeypatch, lambda step: True), 11)


def test_as_many_products_are_counted_as_the_h100_ran():
    """1,319 in Adapt's step, in chunks of 32 Mi logits."""
    steps = {}
    for step in json.loads(MEASURED.read_text())["steps"]:
        if "kernels_ms" in step:
            steps[step["variant"]] = step["kernels_ms"]
    (products,) = (calls for name, _, calls in steps["adapt"] if name == "aten::mm")
    operations = recorded(
        Variant("adapt"), ledger.MODELS["1b"], chunk_elements=2**25, fused_loss=False
    )
    assert sum(operation.name == "mm" for operation in operations) == products == 1319


def test_a_table_names_modules_and_their_pass(tmp_path, monkeypatch, capsys):
    rows = rows_of(
        ledger, tmp_path, monkeypatch, "--model", "tiny", "--loss", "operations", "fused"
    )
    parts = {row["part"] for row in rows}
    assert {"output forward", "optimizer forward", "the step"} <= parts
    assert any(part.startswith("layers.*.") and part.endswith("backward") for part in parts)
    assert capsys.readouterr().out.count("tokens/s") == 2
    before, after = (row["kernels"] for row in rows if row["part"] == "the step")
    assert after < before


class Scaled(torch.nn.Module):
    def forward(self, x):
        return (x * 2).exp() + 1


def test_a_chain_of_a_compiled_module_reads_and_writes_once():
    x = torch.empty(100, 10, device="meta")
    # 1,000 numbers of 4 bytes; the sum of them all, a kernel of its own, writes one.
    for compiled, numbers, kernels in (((), 7000, 4), (("0",), 3000, 2)):
        model = torch.nn.Sequential(Scaled())
        tape = Tape(model, compiled)
        with tape, tape.modules_known():
            model(x).sum()
        operations = fused(tape.operations)
        assert len(operations) == kernels
        assert sum(map(moved_bytes, operations)) == 4 * (numbers + 1)


def test_the_longest_of_three_times_counts():
    prices = Prices(terabytes=1, product_tflops=1, kernel_microseconds=1)
    nothing = Operation("mm", "", False, "product", (), ())
    assert prices.milliseconds(nothing) == 1e-3
    product = Operation("mm", "", False, "product", (), (), flops=10**12)
    assert prices.milliseconds(product) == 1000


def test_a_matrix_that_a_product_is_added_to_is_copied_first():
    """On a GPU; a bias is not, nor a matrix that the result replaces."""
    x, weight, y = (torch.empty(8, 8, device="meta") for _ in range(3))
    bias = torch.empty(8, device="meta")
    for add, copies in (
        (lambda: torch.addmm(y, x, weight), 1),
        (lambda: torch.addmm(bias, x, weight), 0),
        (lambda: torch.addmm(y, x, weight, out=y), 0),
    ):
        tape = Tape(torch.nn.Identity())
        with tape:
            add()
        names = [operation.name for operation in tape.operations]
        assert names == ["copy_"] * copies + ["addmm"]
        assert sum(map(moved_bytes, tape.operations[:-1])) == copies * 2 * 8 * 8 * 4
