"""Exports of models on hosted bases: verified, and the base's own where the gate is closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, StaticCache

from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.trained_model import open_trained
from pipeline.config.run import load_config
from pipeline.conversion.convert import check_written_dtype, convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.errors import ConversionError
from pipeline.files.hashes import file_hash
from pipeline.gating.folder import write_gate
from tests.bases import copy_tokenizer, random_model
from tests.distributed import run_ranks
from tests.extensions.gate.gates import gate_record, random_gate
from tests.extensions.hosted.bases import by_transformers, hosted_config, opened, save_hosted
from tests.extensions.hosted.test_gate import ADAPT
from tests.training.runs import in_turn, make_run, train, write_config
from tests.widened import some_tokens

KINDS = [
    "llama",
    "granite",
    "gemma2",
    "starcoder2",
    "deepseek_v3",
    "phi",
    "gpt2",
    "qwen3_next",
    "mamba",
]
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def method_for(kind: str) -> dict:
    if kind != "mamba":
        return ADAPT
    return {**ADAPT, "expansion": {**ADAPT["expansion"], "num_attention_heads": 2}}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: save_hosted(kind, folder / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def runs(bases, tokens, tmp_path_factory):
    """A trained run of each kind: its configuration."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for kind in KINDS:
        made[kind] = make_run(
            folder / kind,
            tokens,
            zero=1,
            base=str(bases[kind]),
            base_code="transformers",
            method=method_for(kind),
            schedule__steps=4,
            schedule__learning_rate=0.02,
        )
    jobs = [partial(train, path) for path in made.values()]
    assert run_ranks(in_turn, 1, jobs) == [[0] * len(KINDS)]
    return {kind: load_config(path) for kind, path in made.items()}


def gated(config, folder: Path, opens: str) -> Path:
    """A folder with a random gate for the run's newest checkpoint."""
    checkpoint = newest_checkpoint(config)
    model = open_trained(checkpoint, config.base)
    decoder = model.loaded(torch.float32, torch.device("cpu"))
    gate = random_gate(decoder, some_tokens(model.spec, 2, 24), opens=opens)
    request = {"checkpoint_manifest": file_hash(checkpoint / "manifest.json")}
    numbers = {name: getattr(gate, name) for name in ("layer", "features", "bias", "threshold")}
    write_gate(folder, gate, gate_record(request=request, **numbers))
    return folder


@pytest.fixture(scope="module")
def exports(runs, tmp_path_factory):
    """Exported folders by kind and how the gate opens; None: there is no gate."""
    folder = tmp_path_factory.mktemp("exports")
    made = {}

    def export(kind: str, opens: str | None) -> Path:
        if (kind, opens) in made:
            return made[kind, opens]
        config = runs[kind]
        gate = None
        if opens is not None:
            gate = gated(config, folder / f"{kind}-{opens}-gate", opens)
        output = folder / f"{kind}-{opens}"
        conversion = Conversion(newest_checkpoint(config), config.base, output, gate=gate)
        assert convert(conversion, probe_maker({}))
        made[kind, opens] = output
        return output

    return export


def loaded(folder: Path):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True
    ).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_trained(kind, runs, exports):
    folder = exports(kind, None)
    config = runs[kind]
    verification = json.loads((folder / "verification.json").read_text())
    assert verification["top1_agreement"] > 0.99
    model = open_trained(newest_checkpoint(config), config.base)
    decoder = model.loaded(torch.float32, torch.device("cpu"))
    tokens = some_tokens(model.spec, 2, 24)
    exported = loaded(folder)
    found = exported(tokens, use_cache=False).logits
    torch.testing.assert_close(found, decoder.logits(tokens), **NEAR)
    assert (found - decoder.logits(tokens, path="base")).abs().max() > 1e-3


def test_the_folder_runs_without_this_package(exports, tmp_path):
    """With the code that it carries: tests in this process load the package's own copy."""
    folder = exports("granite", "sometimes")
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert 'pipeline' not in sys.modules\n"
        "assert 'transformers_modules' in type(model).__module__\n"
        "tokens = torch.arange(20).view(2, 10)\n"
        "torch.save(model(tokens, use_cache=False).logits, sys.argv[2])\n"
    )
    found = tmp_path / "logits.pt"
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment.pop("PYTHONPATH", None)
    subprocess.run(
        [sys.executable, "-c", code, folder, found], check=True, env=environment, cwd=tmp_path
    )
    with torch.no_grad():
        expected = loaded(folder)(torch.arange(20).view(2, 10), use_cache=False).logits
    assert torch.equal(torch.load(found), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_holds_the_expansion_too(kind, exports):
    model = loaded(exports(kind, None))
    tokens = some_tokens(opened_spec(model), 2, 24)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        first = model(tokens[:, :15], use_cache=True)
        cache = {"past_key_values": getattr(first, "past_key_values", None)}
        if cache["past_key_values"] is None:
            cache = {"cache_params": first.cache_params}
        found = [first.logits]
        # One at a time, as every kind can.
        for at in range(15, 24):
            found.append(model(tokens[:, at : at + 1], use_cache=True, **cache).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, **NEAR)


def opened_spec(model):
    class Spec:
        vocab_size = model.config.vocab_size

    return Spec


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_that_without_a_cache(kind, beams, exports):
    model = loaded(exports(kind, None))
    prompt = some_tokens(opened_spec(model), 2, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    options["eos_token_id"] = None
    with_cache = model.generate(prompt, use_cache=True, **options)
    without = model.generate(prompt, use_cache=False, **options)
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("kind", ["llama", "starcoder2", "gemma2"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_generates_the_same(kind, padded, exports):
    model = loaded(exports(kind, None))
    # Longer than the windows of those that have some.
    prompt = some_tokens(opened_spec(model), 2, 13)
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :4] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    cache = StaticCache(config=model.base.config, max_cache_len=32)
    found = model.generate(prompt, past_key_values=cache, disable_compile=True, **options)
    expected = model.generate(prompt, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for scores, of_growing in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(scores, of_growing, **NEAR)


@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2", "phi", "gpt2"])
def test_padding_on_the_left_changes_nothing(kind, exports):
    model = loaded(exports(kind, "sometimes"))
    tokens = some_tokens(opened_spec(model), 1, 12)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
        expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(found[:, 5:], expected, **NEAR)


@pytest.mark.parametrize("kind", KINDS)
def test_closed_text_is_transformers_own_to_the_bit(kind, bases, exports):
    model = loaded(exports(kind, "never"))
    base = by_transformers(opened(bases[kind]))
    weights = model.base.state_dict()
    for name, tensor in base.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    # The same memory: a product with a vector rounds by where its operands lie (Qwen3-Next has one).
    base.load_state_dict(weights, assign=True)
    tokens = some_tokens(opened_spec(model), 2, 24)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        expected = base(tokens, use_cache=False).logits
        assert torch.equal(model(tokens, use_cache=False).logits, expected)
        one = {"output_scores": True, "return_dict_in_generate": True, **options}
        found = model.generate(tokens, **one)
        theirs = base.generate(tokens, **one)
    assert torch.equal(found.sequences, theirs.sequences)
    for scores, expected in zip(found.scores, theirs.scores, strict=True):
        assert torch.equal(scores, expected)


@pytest.mark.parametrize("kind", ["llama", "granite", "qwen3_next"])
def test_a_gate_decides_with_a_cache_as_without(kind, exports):
    model = loaded(exports(kind, "sometimes"))
    prompt = some_tokens(opened_spec(model), 2, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache = model.generate(prompt, use_cache=True, **options)
    assert torch.equal(with_cache, model.generate(prompt, use_cache=False, **options))


def test_a_merged_export_is_refused_by_name(runs, tmp_path):
    config = runs["granite"]
    request = Conversion(newest_checkpoint(config), config.base, tmp_path / "x", format="merged")
    with pytest.raises(ConversionError, match=r"merged: a hosted base \(model_type granite\)"):
        convert(request, probe_maker({}))
    assert not (tmp_path / "x").exists()


def test_an_expansion_starts_another_run(runs, tokens, tmp_path):
    config = runs["granite"]
    request = Conversion(newest_checkpoint(config), config.base, tmp_path / "x", format="expansion")
    assert convert(request, probe_maker({}))
    path = write_config(
        tmp_path / "run",
        tokens,
        zero=1,
        base=str(config.base),
        method=ADAPT,
        init_expansion=str(tmp_path / "x"),
    )
    assert run_ranks(train, 1, path) == [0]


def test_a_refused_dtype_names_the_types_that_fit(tmp_path):
    """bf16 too where fp16 alone is refused; and no type where experts fit none."""
    gpt_oss = opened(save_hosted("gpt_oss", tmp_path / "gpt_oss")).spec
    check_written_dtype(gpt_oss, torch.bfloat16)
    message = (
        r"--dtype: expected bf16 or fp32 with a hosted base \(model_type gpt_oss\), .*norm\.weight "
        r"in fp32, found float16; leave --dtype out$"
    )
    with pytest.raises(ConversionError, match=message):
        check_written_dtype(gpt_oss, torch.float16)

    spec = opened(save_hosted("qwen3_moe", tmp_path / "qwen3_moe")).spec
    spec = replace(spec, config={**spec.config, "moe_intermediate_size": 18})
    message = (
        r"--dtype: no type of numbers fits a hosted base \(model_type qwen3_moe\), whose experts .*"
        r", found float32; take another base$"
    )
    with pytest.raises(ConversionError, match=message):
        check_written_dtype(spec, torch.float32)


@pytest.mark.full
def test_a_base_with_parameters_in_fp32_beside_16_bits_is_exported_in_fp32(tokens, tmp_path):
    """Published in bf16, as its type mostly is."""
    wanted = hosted_config("ernie4_5_moe")
    wanted.moe_intermediate_size = 24  # products in bf16 take rows of multiples of 16 bytes
    base = random_model(wanted).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    copy_tokenizer(tmp_path / "base")
    path = make_run(
        tmp_path / "run",
        tokens,
        zero=1,
        base=str(tmp_path / "base"),
        method=ADAPT,
        schedule__steps=2,
    )
    assert run_ranks(train, 1, path) == [0]
    config = load_config(path)
    request = Conversion(newest_checkpoint(config), config.base, tmp_path / "x")
    message = (
        r"--dtype: expected fp32 .*mlp\.gate\.weight in fp32, found bfloat16; leave --dtype out"
    )
    with pytest.raises(ConversionError, match=message) as refused:
        convert(replace(request, dtype=torch.bfloat16), probe_maker({}))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "x").exists()
    assert convert(request, probe_maker({}))
    report = json.loads((tmp_path / "x/verification.json").read_text())
    assert report["dtype"] == "float32"
