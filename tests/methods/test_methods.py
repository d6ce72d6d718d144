"""Each method starts at the base, bit for bit, and changes only what it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from pipeline.config.method import Method
from pipeline.errors import ConfigError
from pipeline.methods.registry import method_for
from pipeline.methods.scale import upscale
from pipeline.parallel.parameters import named_trained_parameters
from pipeline.parallel.topology import SINGLE
from tests.widened import SEED, scale_settings, some_batch, some_tokens, unwidened

SETTINGS = {
    "preserve": scale_settings("preserve").model_dump(),
    "adapt": scale_settings("adapt").model_dump(),
    "route": scale_settings("route").model_dump(),
    "fft": {"name": "fft"},
    "freeze": {"name": "freeze", "frozen_layers": 2},
    "lora": {"name": "lora", "rank": 4},
    "lora in part": {"name": "lora", "rank": 4, "alpha": 8, "target_modules": ["query", "down"]},
    "llama_pro": {"name": "llama_pro", "added_layers": 1},
    "llama_pro everywhere": {"name": "llama_pro", "added_layers": 3},
}


def start(base, method, folder=Path("unread")):
    """The model of a run before its first step, through the interface that a run uses."""
    settings = TypeAdapter(Method).validate_python(SETTINGS[method])
    if settings.name == "scale":
        upscale(settings, base, folder, SEED)
    chosen = method_for(settings, folder, SEED)
    model = chosen.build(base.spec, SINGLE, "none")
    chosen.load(model, base, SINGLE)
    return model


def is_trained(method, name):
    """Whether a parameter of the three-layer model trains, independently of the code under test."""
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    if method == "fft":
        return True
    if "router." in name:
        return False
    if method == "freeze":
        return layer == 2 or name.startswith(("final_norm", "output"))
    if method.startswith("lora"):
        return "adapter" in name and (method == "lora" or "query" in name or "down" in name)
    if method == "llama_pro":
        return layer == 3
    if method == "llama_pro everywhere":
        return layer in (1, 3, 5)
    return "expansion" in name


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((method, name) for method in SETTINGS for name in ("llama tied", "neox")),
        ("adapt", "phi3"),
        ("lora", "olmo2"),
        ("llama_pro", "gemma3"),
        *(
            (method, "qwen3_moe")
            for method in ("preserve", "adapt", "route", "fft", "lora", "llama_pro")
        ),
        ("llama_pro", "qwen2_moe"),
        ("llama_pro", "glm4_moe"),
        ("freeze", "mixtral"),
    ],
)
def test_a_method_starts_at_the_base_and_changes_only_what_trains(base, tmp_path, method, name):
    model = start(base(name), method, tmp_path / "initial_expansion")
    tokens = some_tokens(model.spec, 2, 24)
    expected = unwidened(base(name)).logits(tokens)
    assert torch.equal(model.logits(tokens), expected)
    assert torch.equal(model.logits(tokens, path="base"), expected)

    trained = dict(named_trained_parameters(model))
    before = {}
    for key, parameter in model.named_parameters():
        assert (key in trained) == is_trained(method, key), key
        before[key] = parameter.detach().clone()
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    # Blocks at zero feed blocks at zero: the innermost changes in the fourth step.
    for _ in range(4):
        loss, *_ = model(*some_batch(model.spec, 2, 24))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for key, parameter in model.named_parameters():
        has_changed = not torch.equal(parameter, before[key])
        assert has_changed == (key in trained), key
    assert losses[-1] < losses[0]
    assert not torch.equal(model.logits(tokens), expected)
    # Where the base itself does not train, it can still be run.
    assert model.keeps_base == (method not in ("fft", "freeze"))
    assert torch.equal(model.logits(tokens, path="base"), expected) == model.keeps_base


@pytest.mark.parametrize(
    ("method", "copies"), [("llama_pro", {3: 2}), ("llama_pro everywhere", {1: 0, 3: 2, 5: 4})]
)
def test_llama_pro_copies_the_block_below(base, method, copies):
    model = start(base("llama"), method)
    assert model.added_layers == copies.keys()
    for copied, original in copies.items():
        for name, parameter in model.layers[copied].named_parameters():
            expected = model.layers[original].get_parameter(name)
            if name.startswith(("attention.output.", "ffn.down.")):
                # What the block adds to the residual stream starts at zero.
                expected = torch.zeros_like(parameter)
            assert torch.equal(parameter, expected), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "freeze", "frozen_layers": 4},
            "method.frozen_layers: 4, but the base has 3 layers",
        ),
        (
            {"name": "llama_pro", "added_layers": 2},
            "method.added_layers: expected a divisor of the base's 3 layers",
        ),
        (
            {"name": "lora", "rank": 4, "target_modules": ["query", "gate"]},
            "method.target_modules: the base, of family gpt_neox, has no map gate; it has query, key, value, output, "
            "up, down",
        ),
    ],
)
def test_layers_that_the_base_lacks_are_refused(base, settings, message):
    method = method_for(TypeAdapter(Method).validate_python(settings), Path("unread"), SEED)
    with pytest.raises(ConfigError, match=message):
        method.build(base("neox").spec, SINGLE, "none")


@pytest.mark.parametrize("name", ["glm4_moe", "solar_open", "exaone_moe"])
def test_routers_for_which_there_is_no_loss_are_not_trained(base, name):
    method = method_for(TypeAdapter(Method).validate_python(SETTINGS["fft"]), Path("unread"), SEED)
    with pytest.raises(
        ConfigError, match=f"method.name: fft .* family {name}, which has no loss that balances"
    ):
        method.build(base(name).spec, SINGLE, "none")
