"""SCALE-Route against a slow, literal transcription of the paper's Eq. 5, which runs the two models
separately."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.tolerances import PARITY, assert_near
from tests.widened import (
    balance_router,
    scale_settings,
    soft_capped,
    some_batch,
    some_tokens,
    trained_gradients,
    widened,
)

NAMES = ("llama tied", "neox", "olmo2", "gemma2")


def three_models(base):
    """Route, and the Preserve and Adapt models that it is made of, at the same values."""
    changes = {"collaborative_modules": "both"}
    route, adapt = (
        widened(base, scale_settings(variant, **changes), noise=0.1)
        for variant in ("route", "adapt")
    )
    preserve = widened(base, scale_settings("preserve"), noise=0.1)
    balance_router(route, some_tokens(base.spec, 2, 24))
    return route, preserve, adapt


def equation_5(preserve, adapt, tokens, threshold):
    """Token by token: (Z_p + Z_a)/2 + Z_p^up where cos(Z_p, Z_a) > τ, else Z_a + Z_a^up."""
    paths = []
    for model in (preserve, adapt):
        hidden = model.hidden_states(tokens)
        paths.append(
            (F.linear(hidden.x, model.output.base), F.linear(hidden.x_up, model.output.expansion))
        )
    (z_p, z_p_up), (z_a, z_a_up) = paths
    rows, sides = [], []
    for token in range(tokens.numel()):
        cosine = torch.dot(z_p[token], z_a[token]) / (z_p[token].norm() * z_a[token].norm())
        sides.append(cosine.item() > threshold)
        if sides[-1]:
            rows.append((z_p[token] + z_a[token]) / 2 + z_p_up[token])
        else:
            rows.append(z_a[token] + z_a_up[token])
    return soft_capped(adapt.spec, torch.stack(rows)), torch.tensor(sides)


@pytest.mark.parametrize("name", NAMES)
def test_logits_choices_and_gradients_are_those_of_equation_5(base, name):
    route, preserve, adapt = three_models(base(name))
    tokens, targets = some_batch(route.spec, 2, 24)
    logits, sides = equation_5(preserve, adapt, tokens, route.output.threshold)
    assert sides.any()
    assert not sides.all()
    assert_near(route.logits(tokens).flatten(0, 1), logits, PARITY)

    expected_loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    losses = route(tokens, targets)
    assert torch.equal(losses.preserved.flatten(), sides)
    assert_near(losses.total, expected_loss, PARITY)
    losses.total.backward()
    expected_loss.backward()
    of_preserve, of_adapt = trained_gradients(preserve), trained_gradients(adapt)
    for parameter, gradient in trained_gradients(route).items():
        expected = of_adapt[parameter] + of_preserve.get(parameter, torch.zeros(()))
        assert expected.any(), parameter
        assert_near(gradient, expected, PARITY, parameter)


@pytest.mark.parametrize("l_fp", [0, 1, 2])
def test_layers_up_to_l_fp_run_once_and_the_others_twice(base, l_fp):
    model = widened(base("llama"), scale_settings("route", l_fp=l_fp))
    calls = Counter()
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.update([index]))
    model(*some_batch(model.spec, 1, 8))
    assert calls == {index: 1 if index < l_fp else 2 for index in range(3)}
