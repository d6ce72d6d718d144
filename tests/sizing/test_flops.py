"""FLOPs counted on the graph: gates, windows and KL."""

from __future__ import annotations

import pytest
import torch

from pipeline.config.run import load_config
from pipeline.methods.build_model import build_model
from pipeline.model.decoder import Decoder
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.flops import count_flops, count_served_flops
from tests.training.journeys import METHODS
from tests.training.runs import write_config


def test_layers_below_a_gate_that_reads_above_trained_weights_count_twice(base, tmp_path):
    spec = base("stories260K").spec

    def served(layer, **method):
        config = load_config(write_config(tmp_path, tmp_path, gate={}, method=method))
        with torch.device("meta"):
            model = build_model(config, spec, SINGLE)
            whole = count_served_flops(model, 32, layer)
        assert model.gate is None
        return whole

    with torch.device("meta"), torch.no_grad():
        base_alone = count_flops(Decoder(spec), 32).total
    adapters = {"name": "lora", "rank": 4}
    one_path = served(0, **adapters)
    assert one_path.closed == pytest.approx(base_alone)
    parameters = 0
    with torch.device("meta"):
        config = load_config(write_config(tmp_path, tmp_path, method=adapters))
        for name, parameter in build_model(config, spec, SINGLE).named_parameters():
            if ".adapter." in name:
                parameters += parameter.numel()
    assert one_path.open == pytest.approx(base_alone + 2 * parameters)

    # A layer of this base: its matrices, and its scores and weighted values.
    matrices = 0
    for parameter in Decoder(spec).layers[0].parameters():
        if parameter.dim() == 2:
            matrices += parameter.numel()
    scores = 2 * 2 * 32 * spec.widths.num_attention_heads * spec.head_dim
    a_layer = 2 * matrices + scores
    assert served(2, **adapters).open == pytest.approx(one_path.open + 2 * a_layer)
    later = served(2, **adapters, open_first_layer=1)
    earlier = served(1, **adapters, open_first_layer=1)
    assert later.open == pytest.approx(earlier.open + a_layer)


def test_a_window_counts_the_keys_in_it(base):
    spec = base("mistral window").spec
    with torch.device("meta"):
        model = Decoder(spec)
    attention = {length: count_flops(model, length).attention for length in (8, 9, 64)}
    assert attention[8] * 9 == attention[9] * 8  # both fit in the window of 9
    assert attention[64] == attention[9]


def test_kl_counts_what_the_base_computes(base, tmp_path):
    spec = base("stories260K").spec

    def flops(method, **data):
        changes = {f"data__{key}": value for key, value in {"replay_fraction": 0.5, **data}.items()}
        config = load_config(write_config(tmp_path, tmp_path, method=method, **changes))
        with torch.device("meta"):
            return count_flops(build_model(config, spec, SINGLE), 32, config.data.kl_fraction)

    with torch.device("meta"), torch.no_grad():
        whole = count_flops(Decoder(spec), 32)
    for method, extra in (
        ({"name": "fft"}, whole.matrix),
        (METHODS["preserve"], 2 * spec.vocab_size * spec.widths.hidden_size),
    ):
        plain, by_kl = flops(method), flops(method, replay_loss="kl")
        assert by_kl.matrix - plain.matrix == 0.5 * extra
    assert whole.matrix == flops({"name": "fft"}).matrix / 3
