"""The step-0 gate lets an untouched expansion pass, and refuses one that changes what the base says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.files import file_hash
from pipeline.methods import baselines as llama_pro
from pipeline.methods import baselines as lora
from pipeline.scale.expansion import MANIFEST
from tests.distributed import RankError, run_ranks
from tests.training.runs import make_run, train


@pytest.mark.parametrize(
    ("zero", "world_size", "tampered"),
    [
        (3, 2, "layers.4.attention.output.expansion_to_base.weight"),
        (1, 1, "output.expansion"),
    ],
)
def test_a_tampered_expansion_is_refused(tokens, tmp_path, zero, world_size, tampered):
    config = make_run(tmp_path, tokens, zero=zero)
    (file,) = (tmp_path / "upscaled").glob("*.safetensors")
    tensors = load_file(file)
    assert not tensors[tampered].any(), "this block must start at zero"
    tensors[tampered][0, 0] = 0.1
    save_file(tensors, file)
    with pytest.raises(RankError, match=r"CheckpointError: .*safetensors: damaged or missing \(another SHA-256"):
        run_ranks(train, world_size, config)

    manifest = json.loads((tmp_path / "upscaled" / MANIFEST).read_text())
    manifest["hashes"][file.name] = file_hash(file)  # as if it had been made like that
    (tmp_path / "upscaled" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RankError, match=r"PreservationError: .*upscaled: at step 0 .* expected 0.0"):
        run_ranks(train, world_size, config)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "metrics.jsonl").exists()


def _train_with_copies_that_speak(config):
    llama_pro._ZEROED = ()
    return train(config)


def _train_with_adapters_that_speak(config):
    lora.LoraMethod._initial = lambda self, name, shape: torch.full(shape, 0.1)
    return train(config)


@pytest.mark.parametrize(
    ("method", "sabotaged"),
    [
        ({"name": "llama_pro", "added_layers": 1}, _train_with_copies_that_speak),
        ({"name": "lora", "rank": 2}, _train_with_adapters_that_speak),
    ],
)
@pytest.mark.parametrize(("zero", "world_size"), [(3, 2), (1, 1)])
def test_what_was_put_beside_the_base_must_be_silent(tokens, tmp_path, zero, world_size, method, sabotaged):
    config = make_run(tmp_path, tokens, zero=zero, method=method)
    with pytest.raises(RankError, match=r"PreservationError: .*stories260K: at step 0 .* expected 0.0"):
        run_ranks(sabotaged, world_size, config)
    assert not (tmp_path / "metrics.jsonl").exists()
