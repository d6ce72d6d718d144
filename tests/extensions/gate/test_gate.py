"""The gate's features, its folder, and the type in which it is exported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError, ConversionError
from pipeline.gating.folder import GATE_RECORD, open_gate, write_gate
from pipeline.gating.gate import FittedGate, gate_features
from pipeline.hf.load import load_hf_model
from pipeline.scale_math import GATE_DECAY, running_mean
from tests.conversion.checkpoints import training_decoder
from tests.conversion.exports import choose_export, exported
from tests.extensions.gate.gates import gate_record, random_gate
from tests.files import change_json
from tests.tolerances import assert_near, rounding
from tests.widened import scale_settings, some_tokens, widened


def mean_by_hand(values, document_ids):
    """Token by token, in fp64."""
    expected = torch.zeros_like(values, dtype=torch.float64)
    for row in range(len(values)):
        for at in range(values.shape[1]):
            weights = [
                GATE_DECAY ** (at - back) * float(document_ids[row, back] == document_ids[row, at])
                for back in range(at + 1)
            ]
            total = sum(weight * values[row, back].double() for back, weight in enumerate(weights))
            expected[row, at] = total / sum(weights)
    return expected


@settings(max_examples=8)
@given(
    ends=st.lists(st.integers(1, 149), max_size=4, unique=True),
    length=st.integers(1, 150),
    seed=st.integers(0, 99),
)
def test_the_running_mean_is_the_decaying_mean_of_each_document(ends, length, seed):
    values = torch.randn(1, length, 2, generator=torch.Generator().manual_seed(seed))
    document_ids = torch.tensor([[sum(end <= at for end in ends) for at in range(length)]])
    found = running_mean(values, document_ids)
    assert_near(found.double(), mean_by_hand(values, document_ids), rounding(length, 2))
    if not ends:
        assert torch.equal(running_mean(values), found)


def test_features_do_not_depend_on_the_streams_scale():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    token, both = gate_features(x, "token"), gate_features(x, "token+running_mean")
    assert torch.allclose(token.pow(2).mean(-1), torch.ones(2, 5))
    assert_near(gate_features(1000 * x, "token"), token, 1e-5)  # the features' own epsilon
    assert torch.equal(both[..., :8], token) and torch.equal(both[:, 0, 8:], token[:, 0])
    assert gate_features(torch.zeros(1, 1, 8), "token+running_mean").isfinite().all()
    assert gate_features(x.bfloat16(), "token").dtype == torch.float32


RECORD = gate_record(
    request={"checkpoint_manifest": "abc"},
    bias=0.5,
    threshold=1.5,
    auc=0.9,
    closed_fraction_of_new=0.1,
    open_fraction_of_negatives=0.001,
    closed_max_abs_logit_difference=None,
)


@pytest.fixture
def folder(base, tmp_path):
    """A gate's folder, of a gate for "llama tied"."""
    gate = FittedGate(
        1,
        "token",
        torch.randn(32),
        torch.rand(32),
        torch.randn(32),
        bias=0.5,
        threshold=1.5,
        open_ids=(2, 7),
    )
    write_gate(tmp_path / "run" / "gate", gate, RECORD)
    found, record = open_gate(tmp_path / "run" / "gate")
    assert record == RECORD.model_copy(update={"tensors_hash": record.tensors_hash})
    assert replace(found, **gate.tensors) == gate
    assert all(torch.equal(tensor, gate.tensors[name]) for name, tensor in found.tensors.items())
    return tmp_path / "run" / "gate"


DAMAGE = {
    "no record": (
        lambda gate: (gate / GATE_RECORD).unlink(),
        r"gate\.json: no such file; .* run the stage gate",
    ),
    "cut": (lambda gate: (gate / GATE_RECORD).write_text("{"), r"gate\.json: .*fit the gate again"),
    "no tensors": (
        lambda gate: (gate / "gate.safetensors").unlink(),
        r"gate\.safetensors: damaged or missing",
    ),
    "others": (
        lambda gate: save_file({}, gate / "gate.safetensors"),
        r"gate\.safetensors: damaged or missing",
    ),
}


def without_checksum(gate):
    change_json(gate / GATE_RECORD, threshold=-1.5, checksum=None)


DAMAGE |= {
    "another threshold": (
        lambda gate: change_json(gate / GATE_RECORD, threshold=-1.5),
        r"gate\.json: .*changed",
    ),
    "and no checksum": (without_checksum, r"gate\.json: has no checksum.*fit the gate again"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_gate_is_refused(damage, folder):
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        open_gate(folder)


def test_a_cast_to_sixteen_bits_does_not_touch_the_gate(base):
    model = widened(base("llama tied"), scale_settings("preserve"))
    model.gate = gate = random_gate(model, some_tokens(model.spec, 1, 8))
    assert model.bfloat16().gate is gate and gate.weight.dtype == torch.float32
    assert not [name for name in model.state_dict() if "gate.weight" in name and "ffn" not in name]


def test_a_gate_leaves_in_the_scale_format_alone_and_in_fp32(models, tmp_path):
    model = models("llama", "preserve")
    decoder = training_decoder(model)
    gate = replace(random_gate(decoder, some_tokens(decoder.spec, 4, 24)), open_ids=(3, 11))
    gated = replace(model, gate=gate)
    assert choose_export(model, "auto", torch.float32).format == "merged"
    with pytest.raises(ConversionError, match="--without-gate"):
        choose_export(gated, "merged", torch.float32)

    folder = exported(gated, "auto", tmp_path / "hf", torch.bfloat16)
    loaded, stored = load_hf_model(folder), load_file(folder / "model.safetensors")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in gate.tensors.items():
        assert stored[f"token_gate.{name}"].dtype == torch.float32
        assert torch.equal(stored[f"token_gate.{name}"], tensor)
        assert torch.equal(loaded.token_gate.get_buffer(name), tensor)
    table = loaded.token_gate.is_open_id
    assert len(table) == model.base.spec.vocab_size
    assert table.nonzero().flatten().tolist() == [3, 11]
