"""The step-0 gate lets an untouched expansion pass, and refuses one that changes what the base says."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

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

    with pytest.raises(RankError, match=r"PreservationError: .*upscaled: at step 0 .* expected 0.0"):
        run_ranks(train, world_size, config)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "metrics.jsonl").exists()
