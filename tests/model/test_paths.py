"""Which layers each path runs, with which mask, on streams that only count the layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from pipeline.model.gated_paths import run_gated, run_routed_with_gate
from pipeline.model.open_weights import OwnInput
from pipeline.model.paths import (
    LayerPass,
    run_base,
    run_preserved,
    run_routed,
    run_widened,
)
from pipeline.model.recomputation import run_recomputed
from pipeline.model.reference import run_beside_base
from pipeline.open_tokens import OpenTokens

LAYERS = 4
L_FP = 2


@dataclass
class CountingLayer:
    """Adds 1 to x, and 10 by W12 for open tokens; adds 1 to x_up."""

    index: int
    kind: str = "any"
    calls: int = 0

    @property
    def collaborative(self) -> bool:
        return self.index >= L_FP

    def __call__(self, x, x_up, context, open_tokens):
        self.calls += 1
        y = x + 1
        if self.collaborative:
            y = open_tokens.add(y, lambda: 10.0)
        return y, None if x_up is None else x_up + 1


@pytest.fixture
def layers():
    made = [CountingLayer(index) for index in range(LAYERS)]
    return LayerPass(made, {"any": None}, lambda layer: False, run_recomputed)


def streams():
    return torch.zeros(1, 3, 1), torch.zeros(1, 3, 1)


def calls(layers):
    return [layer.calls for layer in layers.layers]


def test_the_widened_path_runs_every_block(layers):
    x, x_up = run_widened(layers, streams())
    assert x.unique().item() == LAYERS + 10 * (LAYERS - L_FP)
    assert x_up.unique().item() == LAYERS
    assert calls(layers) == [1, 1, 1, 1]


def test_the_preserved_path_and_the_base_run_no_w12(layers):
    x, x_up = run_preserved(layers, streams())
    assert x.unique().item() == LAYERS == x_up.unique().item()
    assert torch.equal(run_base(layers, streams()[0]), x)


def test_the_paths_of_route_are_one_below_the_first_layer_with_w12(layers):
    adapted, preserved = run_routed(layers, streams(), streams())
    assert adapted[0].unique().item() == LAYERS + 10 * (LAYERS - L_FP)
    assert preserved[0].unique().item() == LAYERS
    assert calls(layers) == [1, 1, 2, 2]


@pytest.mark.parametrize("gate_layer", range(L_FP + 1))
def test_closed_tokens_of_a_gate_skip_w12(layers, gate_layer):
    read = []

    def decide(x):
        read.append(x)
        return OpenTokens(closed=torch.tensor([True, False, True]).view(1, 3, 1))

    (x, _), open_tokens = run_gated(layers, streams(), gate_layer, L_FP, decide)
    assert [stream.unique().item() for stream in read] == [gate_layer]
    assert x.flatten().tolist() == [4, 24, 4] and open_tokens.closed.sum() == 2
    assert calls(layers) == [1, 1, 1, 1]


@pytest.mark.parametrize("gate_layer", range(L_FP + 1, LAYERS + 1))
def test_layers_below_a_gate_that_reads_further_up_run_twice(layers, gate_layer):
    """The base's pass gives the gate its features and closed tokens their x, which then go on with
    an x_up of zeros: that of the open pass belongs beside the x of the open pass."""
    read = []

    def decide(x):
        read.append(x)
        return OpenTokens(closed=torch.tensor([True, False, True]).view(1, 3, 1))

    own_input = OwnInput(layers.layers[L_FP], torch.full((1, 3, 1), 100.0))
    layers = replace(layers, own_input=own_input)
    (x, x_up), open_tokens = run_gated(layers, streams(), gate_layer, L_FP, decide)
    assert [stream.unique().item() for stream in read] == [gate_layer]
    assert x.flatten().tolist() == [4, 124, 4] and open_tokens.closed.sum() == 2
    above = LAYERS - gate_layer
    assert x_up.flatten().tolist() == [above, LAYERS, above]
    assert calls(layers) == [1, 1] + [2] * (gate_layer - L_FP) + [1] * (LAYERS - gate_layer)


@pytest.mark.parametrize("gate_layer", range(LAYERS + 1))
def test_the_gate_of_route_reads_the_exact_stream_at_any_layer(layers, gate_layer):
    read = []

    def decide(x):
        read.append(x)
        return OpenTokens(closed=torch.ones(1, 3, 1, dtype=torch.bool))

    adapted, preserved, open_tokens = run_routed_with_gate(layers, streams(), gate_layer, decide)
    assert [stream.unique().item() for stream in read] == [gate_layer] and open_tokens.closed.all()
    expected = run_routed(layers, streams(), streams())
    assert torch.equal(adapted[0], expected[0][0]) and torch.equal(preserved[0], expected[1][0])


def test_the_base_runs_beside_the_model_from_the_first_layer_with_w12(layers):
    (x, _), base_x = run_beside_base(layers, (torch.zeros(2, 3, 1), None), layers, sequences=1)
    assert x.unique().item() == LAYERS + 10 * (LAYERS - L_FP)
    assert base_x.shape == (1, 3, 1) and base_x.unique().item() == LAYERS
    assert calls(layers) == [1, 1, 2, 2]


def test_a_model_without_w12_needs_no_base_beside_it(layers):
    below = layers.part(None, L_FP)
    (x, _), base_x = run_beside_base(below, streams(), below, sequences=1)
    assert base_x is None and x.unique().item() == L_FP
