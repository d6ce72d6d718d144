"""Before the first step the widened model is the base model, bit for bit, however its expansion
starts.

The blocks that write to the base stream and to the logits start at zero, which hides every other
one: before each comparison these are shaken, and after it the comparison must fail for a model
whose zeros are shaken too.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pipeline.parallel.parameters import named_trained_parameters
from tests.bases import CONFIGS
from tests.widened import scale_settings, shake, some_tokens, unwidened, widened

KINDS = ("zero", "random", "svd")


@torch.no_grad()
def assert_starts_at_the_base(model, opened, tokens):
    """Its logits are the base's, whatever the blocks are that do not start at zero; and are not,
    once those do not."""
    expected = unwidened(opened).logits(tokens)
    assert torch.equal(model.logits(tokens), expected)
    random = torch.Generator().manual_seed(0)
    for _, parameter in named_trained_parameters(model):
        if parameter.any():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    assert torch.equal(model.logits(tokens), expected)
    shake(model, 0.1)
    assert (model.logits(tokens) - expected).abs().max() > 0.01, (
        "the expansion does not reach the logits"
    )


@pytest.mark.parametrize("variant", ["preserve", "adapt", "route"])
@pytest.mark.parametrize("name", [*CONFIGS, "stories260K"])
def test_logits_equal_the_base_models(base, name, variant):
    tokens = some_tokens(base(name).spec, 2, 32)
    changes = {} if variant == "preserve" else {"collaborative_modules": "both"}
    model = widened(base(name), scale_settings(variant, **changes))
    assert_starts_at_the_base(model, base(name), tokens)


@pytest.mark.parametrize(
    ("norm", "pair"),
    [*(("separate", pair) for pair in product(KINDS, KINDS)), ("base", ("svd", "svd"))],
)
def test_every_pair_of_initialisers_starts_at_the_base(base, pair, norm):
    tokens = some_tokens(base("llama").spec, 2, 32)
    initialisers = dict(zip(("base_to_expansion", "expansion_to_expansion"), pair, strict=True))
    model = widened(base("llama"), scale_settings("adapt", norm=norm, initialisers=initialisers))
    for name, parameter in named_trained_parameters(model):
        starts_at_zero = (
            "expansion_to_base" in name
            or name == "output.expansion"
            or ("base_to_expansion" in name and pair[0] == "zero")
            or ("expansion_to_expansion" in name and pair[1] == "zero")
        )
        assert bool(parameter.any()) != starts_at_zero, name
    assert_starts_at_the_base(model, base("llama"), tokens)


def test_the_new_gains_start_at_the_mean_of_the_bases(base):
    model = widened(base("neox"), scale_settings("adapt"))
    norm = model.layers[1].ffn_norm
    expected = norm.base.weight.mean().expand(12)
    torch.testing.assert_close(norm.expansion.weight.detach(), expected.detach())
    assert not norm.expansion.bias.any()
