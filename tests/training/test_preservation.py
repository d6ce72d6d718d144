"""The preservation check accepts an unmodified expansion, and refuses one that changes the base's
logits.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

from pipeline.expansion_folder import MANIFEST
from pipeline.files.hashes import file_hash
from pipeline.parallel.parameters import fill_whole
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, train

TAMPERED = {3: "layers.4.attention.output.expansion_to_base.weight", 1: "output.expansion"}
SABOTAGED = {
    "llama_pro": ({"name": "llama_pro", "added_layers": 1}, "_ZEROED", ()),
    "lora": (
        {"name": "lora", "rank": 2},
        "fill_whole",
        lambda p, tp, whole: fill_whole(p, tp, whole + 0.1),
    ),
}


@pytest.mark.parametrize(("zero", "world_size"), [(3, 2), (1, 1)])
def test_a_model_that_differs_from_its_base_is_refused(tokens, tmp_path, zero, world_size):
    damaged = make_run(tmp_path / "damaged", tokens, zero=zero)
    tamper(tmp_path / "damaged" / "initial_expansion", TAMPERED[zero])
    consistent = make_run(tmp_path / "consistent", tokens, zero=zero)
    tamper(tmp_path / "consistent" / "initial_expansion", TAMPERED[zero])
    accept(tmp_path / "consistent" / "initial_expansion")
    jobs = [partial(train, damaged), partial(train, consistent)]
    for name, (method, *_) in SABOTAGED.items():
        jobs.append(
            partial(
                train_sabotaged, make_run(tmp_path / name, tokens, zero=zero, method=method), name
            )
        )
    first, *others = run_ranks(in_turn, world_size, jobs)
    # Only the rank that hashes the file finds the fault.
    assert (
        first[0].startswith("CheckpointError: ")
        and "safetensors: damaged or missing (another SHA-256" in first[0]
    )
    assert first[1].startswith(
        f"PreservationError: {tmp_path}/consistent/initial_expansion: at step 0 "
    )
    for refusal in first[2:]:
        assert refusal.startswith("PreservationError: ") and "stories260K: at step 0 " in refusal
    assert all("expected 0.0" in refusal for refusal in first[1:])
    assert others in ([], [["exit 1"] * 4])
    assert not list(tmp_path.glob("*/checkpoints"))
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def tamper(expansion: Path, name: str) -> None:
    """Sets an element of a block that must start at zero."""
    (file,) = expansion.glob("*.safetensors")
    tensors = load_file(file)
    assert not tensors[name].any(), "this block must start at zero"
    tensors[name][0, 0] = 0.1
    save_file(tensors, file)


def accept(expansion: Path) -> None:
    """Gives the manifest the hashes of the files as they are now, and no checksum of its own."""
    manifest = json.loads((expansion / MANIFEST).read_text())
    del manifest["checksum"]
    manifest["hashes"] = {name: file_hash(expansion / name) for name in manifest["hashes"]}
    (expansion / MANIFEST).write_text(json.dumps(manifest))


def train_sabotaged(config: Path, name: str) -> int:
    """Trains a method whose added layers or adapters do not start at zero."""
    _, attribute, value = SABOTAGED[name]
    with patch(f"pipeline.methods.baselines.{attribute}", value):
        return train(config)
