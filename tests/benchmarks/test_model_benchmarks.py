"""The benchmarks of checkpoints, generation, sampling and gates run at their smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    checkpoint,
    cpu_attention,
    expansion_loading,
    generation_speed,
    host_operations,
    random_exports,
    sampling_throughput,
    step_files,
)
from benchmarks.beside_llama import BesideLlama
from benchmarks.gate_separation import __main__ as gate_separation
from benchmarks.gate_separation.__main__ import NEW, OLD
from tests.bases import STORIES
from tests.benchmarks.calls import rows_of
from tests.extensions.self_generated.helpers import copied_stories
from tests.texts import DATA
from tests.tolerances import assert_near

pytestmark = pytest.mark.full


def test_sizes_and_times_of_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    options = [
        "--bases",
        "llama-3.2-1b",
        "--divisor",
        32,
        "--zero-stages",
        1,
        "--rounds",
        1,
        "--folder",
        tmp_path,
    ]
    rows = {row["way"]: row for row in rows_of(checkpoint, tmp_path, monkeypatch, *options)}
    assert list(rows) == list(checkpoint.WAYS)
    for row in rows.values():
        assert 0 < row["blocked_s_min"] <= row["blocked_s"] <= row["on_disk_s"]
    ours, asynchronous, default = (
        rows[way] for way in (checkpoint.OURS, checkpoint.ASYNCHRONOUS, checkpoint.DEFAULT)
    )
    assert ours["bytes"] == pytest.approx(asynchronous["bytes"], rel=0.01)
    # 12 bytes a trained parameter and little more, while the default copies every parameter in 16
    # bits too.
    assert 1 < ours["size_to_needed"] < 1.5
    copies = checkpoint.COPY_BYTES * (ours["base_parameters"] + ours["trainable_parameters"])
    assert default["bytes"] - ours["bytes"] == pytest.approx(copies, rel=0.25)
    table = capsys.readouterr().out
    assert all(way in table for way in checkpoint.WAYS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the checkpoints are gone"


def test_every_model_generates(tmp_path, monkeypatch, capsys):
    sizes = [
        "--layers",
        1,
        "--vocab-size",
        64,
        "--new-tokens",
        3,
        "--turns",
        1,
        "--prompt-tokens",
        20,
    ]
    sizes += ["--gate-features", "token+running_mean", "--batch", 2]
    rows = {row["model"]: row for row in rows_of(generation_speed, tmp_path, monkeypatch, *sizes)}
    states = ["one open", "gate shut", "gate open"]
    widened = ("merged", "scale", "open by id", *states)
    names = [f"1/{share}, {kind}" for share in (8, 2) for kind in widened]
    kinds = ["4 x 1/8", "open weights", "difference", "difference by layer"]
    for runtime in ("hosted", "beside"):
        kinds += [f"{runtime} 1/8", f"{runtime} open weights"]
    names.append("beside 1/8, open by id")
    several = [f"{name}, {state}" for name in kinds for state in states]
    assert set(rows) == {"base", *several, *names} and rows["base"]["ratio_to_base"] == 1
    assert all(
        row["tokens_per_second"] * row["seconds"] == pytest.approx(2 * 3) for row in rows.values()
    )
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["1/8", "open weights"])
def test_the_trial_of_one_runtime_computes_what_native_exports_do(kind):
    sizes = random_exports.BaseSizes(hidden_size=1024, layers=3, vocab_size=64)
    states = ("gate shut", "gate open")
    wanted = [f"{of}{kind}, {state}" for of in ("", "hosted ") for state in states]
    models = random_exports.models(sizes, torch.float32, wanted=wanted)
    # Of the same weights.
    beside = BesideLlama.of(models["base"], models[f"{kind}, gate open"])
    models |= {f"beside {kind}, {state}": beside for state in states}
    tokens = torch.arange(12).unsqueeze(0)
    logits = {}
    for name in set(models) - {"base"}:
        random_exports.set_gates(models[name], name.partition(", ")[2])
        cache = models[name](tokens[:, :9], use_cache=True).past_key_values
        steps = [models[name](tokens).logits]
        for place in range(9, 12):
            step = models[name](tokens[:, place : place + 1], past_key_values=cache)
            steps.append(step.logits)
        logits[name] = torch.cat(steps, dim=1)
    of_base = models["base"](tokens).logits
    for of in ("", "beside ", "hosted "):
        assert torch.equal(logits[f"{of}{kind}, gate shut"][:, :12], of_base)
    assert_near(logits[f"beside {kind}, gate open"], logits[f"{kind}, gate open"], 1e-5)
    change = (logits[f"{kind}, gate open"][:, :12] - of_base).abs().max()
    assert change > 1e-3, "the gate changes nothing"


def test_expansions_are_loaded_with_their_base(tmp_path, monkeypatch):
    sizes = ["--hidden-size", 1024, "--layers", 1, "--vocab-size", 64, "--turns", 1]
    folder = ["--folder", tmp_path]
    rows = rows_of(expansion_loading, tmp_path, monkeypatch, *sizes, *folder)
    base, alone, all_of_them = rows
    assert base["bytes"] == alone["bytes"] and base["ratio_to_bytes"] == 1
    # Four expansions by an eighth, below whose gates and l_fp nothing reads x_up into x.
    assert 1.4 < all_of_them["bytes_ratio"] < 2.1
    for row in rows:
        assert 0 < row["seconds_unread"] < row["seconds"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the models are gone"


@pytest.mark.parametrize("dtype", cpu_attention.TYPES)
def test_documents_of_every_length_are_attended_to(dtype, tmp_path, monkeypatch):
    options = ["--sequence-lengths", 16, 64, "--turns", 1, "--dtype", dtype]
    rows = rows_of(cpu_attention, tmp_path, monkeypatch, *options)
    assert [row["document"] for row in rows] == [16, 8, 4, 1, 64, 32, 16, 4]
    for row in rows:
        assert row["documents_ms"] > 0 and row["masked_ms"] > 0
        # Of values of about 1, in the type's steps.
        assert row["difference"] <= {"fp32": 1e-5, "bf16": 0.1}[dtype]


@pytest.mark.parametrize("of_chats", [False, True])
def test_every_batch_size_is_sampled(of_chats, tmp_path, monkeypatch):
    sizes = ["--batch-sizes", 1, 3, "--documents", 2, "--max-tokens", 12, "--turns", 1]
    base = copied_stories(
        tmp_path / "chat", tokenizer_config={"chat_template": "{{ messages[0].content }}"}
    )
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"content": "Hi"}, {"content": "Ho"}]}) + "\n"
    )
    chats = ["--chats", tmp_path / "chats.jsonl"] if of_chats else []
    rows = rows_of(sampling_throughput, tmp_path, monkeypatch, "--base", base, *sizes, *chats)
    ways = [f"{way}, {size} at a time" for size in (1, 3) for way in ("generate", "sample")]
    assert [row["way"] for row in rows] == ["generate, one at a time", *ways]
    assert rows[0]["times_one_at_a_time"] == 1 and all(row["tokens_per_second"] > 0 for row in rows)


SMALL = ["--base", STORIES, "--tokens", 400, "--max-open-fraction", 0.02, "--sequence-length", 64]


def test_pairs_and_the_bases_own_text(tmp_path, monkeypatch, capsys):
    for name in (NEW, f"{NEW}.heldout", OLD):
        file = f"{name}.jsonl.zst"
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).symlink_to(DATA / file)
    rows = rows_of(
        gate_separation,
        tmp_path,
        monkeypatch,
        *SMALL,
        "--data",
        tmp_path,
        "--own-text",
        1000,
        "--layers",
        2,
    )
    assert [(row["new"], row["fitted_against"], row["features"]) for row in rows] == [
        (NEW, OLD, "token"),
        (NEW, OLD, "token+running_mean"),
        (NEW, "own text", "token+running_mean"),
    ]  # the files of the other pairs are missing
    for row in rows[:2]:
        assert row["auc"] > 0.99 and row["new_open"] > 0.9 and row["old_open"] < 0.05
    assert NEW in capsys.readouterr().out


def test_what_deepspeed_costs_the_host_grows_with_the_trained_tensors(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(Path(__file__).parents[2])
    options = ["--layers", 2, 3, "--turns", 1, "--ways", "zero1", "zero2"]
    rows = rows_of(host_operations, tmp_path, monkeypatch, *options)
    assert [(row["way"], row["layers"]) for row in rows] == [
        ("zero1", 2),
        ("zero1", 3),
        ("zero2", 2),
        ("zero2", 3),
    ]
    for row in rows:
        for kind in host_operations.KINDS:
            assert row[f"plain_{kind}"] > 0
        assert row["plain_calls"] < row["deepspeed_calls"]
    one, two = json.loads((tmp_path / "out" / "rows.json").read_text())["slopes"]
    # A hook for each tensor under ZeRO-2, and a loop over them under ZeRO-1.
    assert one["operations_a_tensor"] > 2 and 10 < one["calls_a_tensor"] < two["calls_a_tensor"]
    assert "calls a tensor" in capsys.readouterr().out


def test_the_files_of_a_plain_step(tmp_path, monkeypatch):
    """A plain step meets no gate, no mixture, no quantised base and no new tokens."""
    monkeypatch.chdir(Path(__file__).parents[2])
    rows = rows_of(step_files, tmp_path, monkeypatch)
    files = {row["file"] for row in rows}
    assert {"training/trainer.py", "model/decoder.py", "scale/widened_linear.py"} <= files
    optional = {"model/gated_paths.py", "model/mixture.py", "model/new_tokens.py"}
    assert not files & (optional | {"parallel/quantized.py", "observers/early_stop.py"})
    assert not [file for file in files if file.startswith(("extensions/", "gating/"))]
    # As of November 2026: what a plain step passes through may shrink, and not grow unseen.
    assert len(files) <= 30 and sum(row["lines"] for row in rows) <= 5_600
