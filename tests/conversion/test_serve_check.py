"""The check of an export in every serving format, at its smallest size."""

from __future__ import annotations

import json
from typing import get_args

import pytest
import torch

from pipeline.conversion import ServedPrecision, llama_cpp, stock
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.verify import probe_maker
from pipeline.errors import ConversionError
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, save_many, scale
from tests.distributed import run_ranks
from tests.programs import call
from tools import serve_check

TEXTS = ("data/en/stories.heldout.jsonl.zst",)
LLAMA = [name for name in serve_check.FORMATS if name.startswith("llama.cpp")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """stories260K widened for Q8_0, as a checkpoint; after no step, so that what it says is the base's."""
    folder = tmp_path_factory.mktemp("checked")
    widths = {"hidden_size": 32, "intermediate_size": 20, "num_attention_heads": 4}
    jobs = [
        (STORIES, scale("adapt", norm=norm, expansion=widths), folder / norm, 1, None, 1, 0.0)
        for norm in ("base", "separate")
    ]
    run_ranks(save_many, 1, jobs)
    return folder


def exported(folder, norm="base", dtype=torch.bfloat16):
    output = folder / f"{norm}-{dtype}"
    convert(Conversion(checkpoint_in(folder / norm, 1), STORIES, output, "auto", dtype), probe_maker({}))
    return output


def run(monkeypatch, *arguments):
    return call(serve_check, *arguments)


def test_every_row_of_a_sound_export_holds(folder, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "rows.json"
    formats = ["bf16", "fp16", "int8", "q8_0", "q4_k", "fp8"]  # blocks of nf4 cross rows of 96
    if not llama_cpp.why_missing():
        formats += LLAMA
    options = ("--export", exported(folder), "--text", *TEXTS, "--json", output)
    code = run(monkeypatch, *options, "--formats", *formats)
    rows = json.loads(output.read_text())["rows"]
    assert [row["format"] for row in rows] == formats
    assert [row for row in rows if row["fault"]] == [] and code == 0
    text = "stories.heldout.jsonl.zst"
    for row in rows:
        assert row["export_factor"] <= 1.01 * max(1, row["base_factor"])
        # stories260K itself, which predicts this text well; each model is compared with its own fp32.
        assert 1 < row["base"]["perplexity"][text] < 5 and 1 < row["export"]["perplexity"][text] < 6
        assert 0 <= row["base"]["greedy_tokens_kept"][text] <= 16
    exact = [row for row in rows if row["format"] in ("fp16", "llama.cpp:f32")]
    assert all(row[who]["greedy_tokens_kept"][text] == 16 for row in exact for who in ("base", "export"))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(rows) + 2 and "base, stories" in printed[0] and printed[-1].endswith("every row holds")


def test_a_format_that_breaks_the_export_fails(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stock, "scale_in", lambda dtype: 2.0**-20)
    monkeypatch.setattr(llama_cpp, "why_missing", lambda: "pip install it")
    output = tmp_path / "broken"
    convert(Conversion(checkpoint_in(folder / "base", 1), STORIES, output, "stock", torch.bfloat16), probe_maker({}))
    assert run(monkeypatch, "--export", output, "--formats", "bf16", "fp16", "llama.cpp:q8_0") == 1
    printed = capsys.readouterr().out
    assert "llama.cpp is not checked: pip install it" in printed and "perplexity grows by" in printed
    assert printed.splitlines()[-1].endswith("do not serve it in fp16")


def test_other_formats_of_export_are_measured_without_llama_cpp(folder, monkeypatch, capsys):
    options = ("--export", exported(folder, "separate", torch.float32), "--formats", "fp32", "q8_0", *LLAMA)
    assert run(monkeypatch, *options) == 0
    printed = capsys.readouterr().out
    assert "llama.cpp is not checked: it runs stock exports alone" in printed and "fp32" in printed


def test_a_folder_that_is_no_export_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConversionError, match=r"conversion.json: no such file; convert the run's checkpoint"):
        run(monkeypatch, "--export", tmp_path)
    with pytest.raises(SystemExit):
        run(monkeypatch)


def test_every_precision_is_a_row():
    assert set(serve_check.FORMATS) == {*get_args(ServedPrecision), *LLAMA} and len(LLAMA) == 5
