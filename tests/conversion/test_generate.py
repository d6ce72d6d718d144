"""The shipped modelling file: with and without a cache, padded on the left, and without this package installed."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from pipeline.conversion.hf_folder import load_hf_model
from tests.bases import STORIES
from tests.conversion.checkpoints import generate_greedily, save_many, scale, trained, training_decoder
from tests.conversion.clean_environment import clean_environment, run_in
from tests.conversion.exports import exported
from tests.distributed import run_ranks
from tests.tolerances import assert_near, rounding_of
from tests.widened import balance_router, some_tokens

MODELS = {"route": ("llama tied", "route"), "adapt": ("llama", "adapt"), "neox": ("neox", "route")}
NEW_TOKENS = 12
generate = partial(generate_greedily, new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """Exported models; Route's thresholds are set so that some tokens take either path."""
    folder = tmp_path_factory.mktemp("generate")
    jobs = [
        (base(name).path, scale(variant, collaborative_modules="both"), folder / key)
        for key, (name, variant) in MODELS.items()
    ]
    jobs.append((STORIES, scale("route", l_fp=2, router_threshold=0.9), folder / "stories"))
    run_ranks(save_many, 1, jobs)
    made = {}
    for path, _, place in jobs:
        model = trained(path, place)
        made[place.name] = exported(model, "scale", place.with_name(f"{place.name}-hf"))
        if model.plan.routed and place.name != "stories":
            decoder = training_decoder(model)
            balance_router(decoder, some_tokens(model.spec, 4, 24))
            config = made[place.name] / "config.json"
            config.write_text(
                json.dumps(json.loads(config.read_text()) | {"router_threshold": decoder.output.threshold})
            )
    return made


@torch.no_grad()
@pytest.mark.parametrize("key", MODELS)
def test_logits_token_by_token_equal_logits_at_once(key, folders):
    model = load_hf_model(folders[key])
    tokens = some_tokens(model.config, 2, 14)
    expected = model(tokens, use_cache=False).logits
    cache, steps = None, []
    for part in tokens.split([5, 1, 1, 4, 3], dim=1):  # also several tokens on top of a cache
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert_near(torch.cat(steps, dim=1), expected, rounding_of(model.config))
    assert_near(model(tokens, logits_to_keep=2).logits, expected[:, -2:], rounding_of(model.config))


@torch.no_grad()
def test_both_paths_of_the_router_are_taken(folders):
    model = load_hf_model(folders["route"])
    tokens = some_tokens(model.config, 4, 24)
    routed = model(tokens).logits
    others = []
    for threshold in (-1.1, 1.1):
        model.output.threshold = threshold
        others.append((model(tokens).logits == routed).all(-1))
    preserved, adapted = others
    assert (preserved ^ adapted).all() and preserved.any() and adapted.any()


@torch.no_grad()
def test_layers_may_be_on_several_devices(folders):
    model = load_hf_model(folders["route"])
    elsewhere = torch.device("meta")  # it computes nothing, and refuses tensors of another device as a GPU does
    for module in (*model.layers[1:], model.final_norm, model.output):
        add_hook_to_module(module.to(elsewhere), AlignDevicesHook(execution_device=elsewhere))  # as device_map does
    tokens = some_tokens(model.config, 2, 9)
    out = model(tokens, attention_mask=torch.ones_like(tokens))
    assert out.logits.device == elsewhere and out.logits.shape == (2, 9, model.config.vocab_size)
    model(tokens[:, :1], past_key_values=out.past_key_values)


_CLEAN_SCRIPT = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
for absent in ("pipeline", "deepspeed", "zstandard"):
    try:
        __import__(absent)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{absent} can be imported: the environment is not clean")
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
prompt = tokenizer("Once upon a time", return_tensors="pt")
tokens = model.generate(prompt.input_ids, attention_mask=prompt.attention_mask, max_new_tokens=20, do_sample=False)
print(tokens[0].tolist())
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
"""


def test_it_generates_where_only_torch_and_transformers_are_installed(folders, tmp_path):
    environment = clean_environment(tmp_path / "site")
    tokens, text = (
        run_in(environment, _CLEAN_SCRIPT, str(folders["stories"]), home=tmp_path / "home").strip().split("\n", 1)
    )
    here = load_hf_model(folders["stories"])
    prompt = torch.tensor([json.loads(tokens)[:-20]])
    assert generate(here, prompt)[0].tolist() == json.loads(tokens)[: prompt.shape[1] + NEW_TOKENS]
    assert text.strip().startswith("Once upon a time")
