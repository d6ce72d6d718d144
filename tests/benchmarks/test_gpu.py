"""The benchmark of a training step, and the check of a machine with a GPU, tried on the CPU."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import weakref

import pytest
import torch

from benchmarks.gpu import __main__ as parts
from benchmarks.gpu import attention, fp8_rounding, ranks
from benchmarks.gpu.setting import CheckRow, Setting
from benchmarks.gpu_step import __main__ as gpu_step
from benchmarks.gpu_step import models
from benchmarks.gpu_step import training_step as training_steps
from benchmarks.gpu_step.contender import Contender
from benchmarks.gpu_step.shapes import SHAPES, TINY, TINY_PACKED, Shape
from benchmarks.gpu_step.table import columns_of, row_of
from benchmarks.gpu_step.table import rows_of as rows_of_contenders
from benchmarks.gpu_step.training_step import TrainingStep
from benchmarks.gpu_step.variants import OURS, THEIRS, Variant, all_variants
from benchmarks.results import ROOT, Elapsed
from pipeline.model.attention import CausalAttention
from tests.benchmarks.calls import rows_of

pytestmark = pytest.mark.full

# What a quantised base is off by says nothing about exactness; memory is measured on a GPU.
NOT_JUDGED = ("transformers in fp32", "without scores of all pairs")


def rows_of_part(part, folder):
    return {row.check: row for row in parts.rows_of(part, Setting("cpu", folder, 60.0))}


def test_no_part_needs_deepspeed_to_begin():
    modules = {f"benchmarks.gpu.{module}" for module, *_ in parts.PARTS.values()}
    program = f"import sys; sys.modules['deepspeed'] = None; import {', '.join(sorted(modules))}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("part", ["parity", "attention"])
def test_exactness_holds_on_the_cpu(part, tmp_path):
    rows = rows_of_part(part, tmp_path)
    assert len(rows) >= 16
    assert [
        row
        for name, row in rows.items()
        if row.passed is not True and not name.endswith(NOT_JUDGED)
    ] == []


def test_a_kernel_that_gives_nan_fails(tmp_path, monkeypatch):
    """Its results or its gradients: `max(0.0, nan)` is 0.0 in Python."""

    class WithNan:
        def __init__(self, *, in_gradients):
            self.in_gradients = in_gradients

        def __call__(self, query, key, value):
            result = CausalAttention()(query, key, value)
            if self.in_gradients:
                result.register_hook(lambda gradient: gradient * torch.nan)
                return result
            return result * torch.nan

    for in_gradients in (False, True):
        kernel = WithNan(in_gradients=in_gradients)
        monkeypatch.setattr(attention, "_kernels", lambda *_, kernel=kernel, **__: [kernel])
        rows = rows_of_part("attention", tmp_path).values()
        of_kernel = [row for row in rows if row.check.startswith("WithNan")]
        assert len(of_kernel) == 24
        assert not any(row.passed for row in of_kernel)
        assert {row.found for row in of_kernel} == {"nan"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_loss_is_nan_fails(rank, tmp_path, monkeypatch):
    """The losses and the norms are compared as the two processes send them."""

    class Rank:
        def join(self):
            pass

    def two(_, target, port, setting, senders):
        for number, sender in enumerate(senders):
            loss, norm = ranks._loss_and_norm(setting, ranks.SINGLE)
            sender.send((torch.nan if number == rank else loss, norm))
        return [Rank(), Rank()]

    monkeypatch.setattr(ranks, "_two", two)
    row = ranks.check_two_ranks(Setting("cpu", tmp_path, 60.0))
    assert (row.passed, row.found) == (False, "off by nan")


def test_a_product_in_fp8_whose_gradient_is_nan_fails(tmp_path, monkeypatch):
    with_gradient = fp8_rounding._with_gradient

    def with_nan(*arguments):
        y, of_x = with_gradient(*arguments)
        return y, of_x * torch.nan

    monkeypatch.setattr(fp8_rounding, "_with_gradient", with_nan)
    rows = fp8_rounding.check_rounding(Setting("cpu", tmp_path, 60.0))
    against_cpu = [row for row in rows if row.check.endswith("against a CPU's")]
    assert against_cpu
    assert not any(row.passed for row in against_cpu)


@pytest.mark.parametrize(
    ("part", "outcomes"),
    [
        ("exports", [None, True, None]),
        ("watchdog", [True, True]),
        ("memory", [None] * 22),
        ("step-1b-4096", [None] * 2),
    ],
)
def test_a_part_is_tried_on_the_cpu(part, outcomes, tmp_path):
    assert [row.passed for row in rows_of_part(part, tmp_path).values()] == outcomes


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    return parts.main()


def test_a_part_that_takes_too_long_is_ended_and_what_was_found_is_kept(
    tmp_path, monkeypatch, capsys
):
    options = ["--only", "attention", "--part-seconds", "0.5", "--output", str(tmp_path)]
    assert call(monkeypatch, "--cpu", *options) == 1
    written = json.loads((tmp_path / "results.json").read_text())
    assert [row["check"] for row in written["rows"]] == ["ends in time"]
    assert written["about"]["torch"] and written["on_gpu"] is False
    assert "1 parts tried: 0 checks passed, 1 failed" in capsys.readouterr().out


def test_parts_may_share_a_time_limit(tmp_path, monkeypatch, capsys):
    given = []

    def run_part(part, setting, seconds):
        given.append(seconds)
        return [CheckRow("something", True, "found")]

    monkeypatch.setattr(parts, "run_part", run_part)
    setting = Setting("cpu", tmp_path, 600.0)
    assert parts.run_parts(parts.QUICK, setting, total_seconds=100.0) == 0
    assert len(given) == len(parts.QUICK) and all(90 < seconds <= 100 for seconds in given)
    assert parts.run_parts(["fp8"], setting, total_seconds=1.0) == 1
    assert len(given) == len(parts.QUICK), "it did not begin"
    assert "make gpu ONLY=fp8" in capsys.readouterr().out


CPU = torch.device("cpu")


def test_every_variant_is_measured(tmp_path, monkeypatch, capsys):
    arguments = ["--cpu", "--tiny", "--shape", "1b-8192", "--threads", 1]
    arguments += ["--rounds", 1, "--steps", 1]
    rows = {row["variant"]: row for row in rows_of(gpu_step, tmp_path, monkeypatch, *arguments)}
    assert list(rows) == [str(variant) for variant in all_variants(compiled=True)]
    assert {*OURS, *THEIRS, "adapt + compile"} <= set(rows)
    assert {"preserve + fp8", "adapt + nf4", "lora + nf4 + compile"} <= set(rows)
    missing = ", ".join(
        name for name in models.LIGER_PACKAGES if importlib.util.find_spec(name) is None
    )
    lacking = {f"{name} + liger": f"needs {missing}" for name in THEIRS} if missing else {}
    assert {
        name: row["outcome"] for name, row in rows.items() if row["outcome"] != "measured"
    } == lacking
    assert all(row["tokens_per_second"] > 0 for name, row in rows.items() if name not in lacking)
    assert not any("peak_memory_gib" in row for row in rows.values()), "measured on a GPU only"
    for name in ("ratio_to_fft", "ratio_to_fft_min", "ratio_to_fft_cpu", "ratio_to_fft_flops"):
        assert rows["fft"][name] == 1
    assert rows["peft_lora"]["ratio_to_peft_lora"] == 1
    assert (
        rows["preserve"]["flops_per_token"]
        < rows["adapt"]["flops_per_token"]
        < rows["fft"]["flops_per_token"]
    )
    assert rows["lora"]["trained_parameters"] == rows["peft_lora"]["trained_parameters"]
    assert rows["fft"]["trained_parameters"] == rows["transformers_fft"]["trained_parameters"]
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == "1b-8192:" and len(lines) == 1 + len(rows)
    for column in ("seconds min", "cpu seconds per step", "ratio to fft min", "ratio to fft cpu"):
        assert column in head


def test_packed_documents_are_measured_beside_whole_rows(tmp_path, monkeypatch, capsys):
    """The same steps, with less attention: of ours, and of transformers, which finds the documents
    by their positions."""
    arguments = ["--cpu", "--tiny", "--shape", "1b-8192", "1b-8192-packed", "--threads", 1]
    arguments += ["--rounds", 1, "--steps", 1, "--variant", "fft", "adapt", "transformers_fft"]
    rows = rows_of(gpu_step, tmp_path, monkeypatch, *arguments)
    whole, packed = rows[:3], rows[3:]
    assert [row["shape"] for row in packed] == ["1b-8192-packed"] * 3
    for one, other in zip(whole, packed, strict=True):
        assert one["outcome"] == other["outcome"] == "measured"
        assert one["flops_per_token"] > other["flops_per_token"]
    assert capsys.readouterr().out.count("packed:") == 1


def test_documents_of_a_packed_shape_are_of_500_to_1000_tokens():
    whole, packed = SHAPES["1b-8192"], SHAPES["1b-8192-packed"]
    assert packed._replace(documents=None) == whole
    assert whole.document_lengths == [[8192], [8192]] and whole.share_of_pairs == 1
    for row in packed.document_lengths:
        assert sum(row) == 8192 and all(500 <= length <= 1000 for length in row[:-1])
    assert packed.document_lengths == packed.document_lengths
    # Rows of n documents of one length have a share of 1 / n; a row has 11 or 12 of these.
    assert 1 / 12 < packed.share_of_pairs < 1 / 9
    step = TrainingStep(Variant("fft"), TINY_PACKED, CPU, torch.float32)
    assert step._documents.per_row == (len(TINY_PACKED.document_lengths[0]),)
    lengths = step._documents.starts.diff().tolist()
    assert [lengths] == TINY_PACKED.document_lengths
    assert step._positions.tolist() == [[at for own in lengths for at in range(own)]]


@pytest.mark.parametrize("method", ["fft", "transformers_fft"])
def test_no_token_of_a_packed_document_sees_another(method):
    """Another first token changes its own document, and nothing behind it."""
    step = TrainingStep(Variant(method), TINY_PACKED, CPU, torch.float32)
    step.allocate()
    step._tokens = torch.arange(16).unsqueeze(0)
    changed = step._tokens.clone()
    changed[0, 0] = 40
    first = TINY_PACKED.document_lengths[0][0]

    def hidden(tokens):
        """[S, D] or [S, V]"""
        if method == "fft":
            return step._model.hidden_states(tokens, step._positions, step._documents).x
        return step._model(tokens, position_ids=step._positions).logits[0]

    one, other = hidden(step._tokens), hidden(changed)
    assert len(one) == 16
    assert not torch.equal(one[:first], other[:first])
    assert torch.equal(one[first:], other[first:])


def test_ratios_of_minima_and_of_processor_time_do_not_depend_on_other_load():
    """Two variants of which the second takes half the time; two of its three steps are delayed."""
    shape = Shape(TINY.architecture, 1, 16, 2)
    full = Contender(Variant("fft"), shape, CPU, torch.float32)
    full.steps = [Elapsed(2.0, 4.0), Elapsed(2.0, 4.0), Elapsed(2.2, 4.0)]
    half = Contender(Variant("preserve"), shape, CPU, torch.float32)
    half.steps = [Elapsed(3.0, 2.1), Elapsed(1.0, 2.0), Elapsed(3.0, 2.0)]
    reference, row = rows_of_contenders([full, half], "tiny")
    assert (row["seconds_per_step"], row["seconds_min"], row["seconds_max"]) == (3.0, 1.0, 3.0)
    assert row["cpu_seconds_per_step"] == 2.0
    assert row["ratio_to_fft"] == 1.5
    assert row["ratio_to_fft_min"] == row["ratio_to_fft_cpu"] == 0.5
    flops = row["flops_per_token"] / reference["flops_per_token"]
    assert row["ratio_to_fft_flops"] == flops < 0.7


def test_a_gpu_has_no_processor_time():
    own = Contender(Variant("fft"), TINY, torch.device("cuda"), torch.float32)
    own.steps = [Elapsed(2.0, 4.0)]
    assert "cpu_seconds_per_step" not in row_of(own, "tiny")
    assert "ratio_to_fft_min" in columns_of(own.device)
    assert "ratio_to_fft_cpu" not in columns_of(own.device)


@pytest.mark.parametrize("method", ["fft", "preserve", "transformers_fft"])
def test_a_mixture_of_experts_takes_a_turn(method):
    shape = Shape(SHAPES["moe-96m"].architecture.with_name("qwen3-moe-3m.json"), 1, 16, 4)
    contender = Contender(Variant(method), shape, CPU, torch.float32)
    contender.turn(1)
    assert row_of(contender, "tiny")["outcome"] == "measured"


def test_a_variant_without_enough_memory_gives_back_what_it_had(monkeypatch):
    """The variants that follow need it."""
    models_made = []
    build = training_steps._build

    def remembered(*arguments):
        model = build(*arguments)
        models_made.append(weakref.ref(model))
        return model

    def fails(_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training_steps, "_build", remembered)
    contender = Contender(Variant("adapt"), TINY, CPU, torch.float32)
    contender.turn(1)
    monkeypatch.setattr(training_steps, "set_randomly", fails)
    contender.turn(1)
    gc.collect()
    assert row_of(contender, "tiny")["outcome"] == "out of memory"
    assert [model() for model in models_made] == [None]
