"""Checkpoints of real DeepSpeed runs, read back without DeepSpeed: equal to the bit, at every layout."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.checkpoint.reader import CheckpointReader
from pipeline.conversion.trained_model import open_trained, skeleton
from pipeline.errors import BaseModelError, CheckpointError
from pipeline.methods import method_for
from pipeline.parallel.sharding import Partition, merge
from tests.bases import STORIES
from tests.conversion.checkpoints import FFT, checkpoint_in, partitions, save, save_many, scale, trained, zero
from tests.distributed import run_ranks
from tests.widened import SEED, scale_settings

LAYOUTS = {
    "ZeRO-1, dp 2": (2, 1, zero(1)),
    "ZeRO-2, dp 2": (2, 1, zero(2)),
    "ZeRO-3, dp 2": (2, 1, zero(3)),
    "ZeRO-3, dp 3, several flat tensors": (3, 1, zero(3, sub_group_size=600)),
    "ZeRO-2, tp 2": (2, 2, zero(2)),
    "ZeRO-3, tp 2 x dp 2": (4, 2, zero(3)),
    "ZeRO-1, tp 4, shared key/value heads": (4, 4, zero(1)),
    "ZeRO-1, dp 2, bf16": (2, 1, zero(1, "bf16")),
    "ZeRO-3, dp 2, bf16": (2, 1, zero(3, "bf16")),
}


METHODS = {"route": scale("route"), "fft": FFT}
FILE_OVERHEAD = 2**16
"""Names, shapes and the archive's own table, in bytes."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_and_moment_comes_back(layout, base, tmp_path):
    world_size, tp_size, values = LAYOUTS[layout]
    path = base("llama").path
    jobs = [(path, method, tmp_path / name, tp_size, values) for name, method in METHODS.items()]
    ranks = run_ranks(save_many, world_size, jobs)
    for index, (name, method) in enumerate(METHODS.items()):
        reader = trained(path, tmp_path / name).reader
        assert (reader.dp_size, reader.tp_size) == (world_size // tp_size, tp_size)
        check(reader, [held[index] for held in ranks[:tp_size]], partitions(path, method))


def check(reader: CheckpointReader, shards: list[dict[str, dict[str, Tensor]]], split: dict[str, Partition]) -> None:
    """Compares with what each tensor-parallel rank held."""
    assert set(reader.names) == set(shards[0]["fp32"]) and not reader.frozen_names
    for name in reader.names:
        size = reader.read(name).shape[split[name].dim or 0]
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            expected = merge([shard[kind][name] for shard in shards], split[name], size)
            found = reader.read(name) if kind == "fp32" else reader.read_moment(name, kind)
            assert found.dtype == torch.float32
            assert torch.equal(found, expected), (name, kind)
    assert any(reader.read_moment(name, "exp_avg_sq").any() for name in reader.names)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_that_were_saved_too_come_back(stage, base, tmp_path):
    opened = base("neox")
    folder = tmp_path / "run"
    run_ranks(partial(save, with_frozen=True), 2, opened.path, scale("preserve"), folder, 1, zero(stage))
    method = method_for(scale_settings("preserve"), Path("unread"), SEED)

    reader = CheckpointReader(folder, skeleton(method, opened))

    assert len(reader.frozen_names) > 10
    for name in reader.frozen_names:
        assert torch.equal(reader.read(name), opened.read(name)), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_holds_what_trained_once(stage, tmp_path):
    """12 bytes a trained parameter; of the base nothing, though it ties its embedding, which DeepSpeed would write."""
    run_ranks(save, 2, STORIES, scale("adapt"), tmp_path / "run", 1, zero(stage, "bf16"))
    model = trained(STORIES, tmp_path / "run")
    assert model.spec.tie_word_embeddings
    owed = 12 * sum(math.prod(model.shapes[name]) for name in model.trained)
    written = sum(file.stat().st_size for file in model.checkpoint.glob("*_states.pt"))
    files = len(list(model.checkpoint.glob("*_states.pt")))
    assert owed < written < 1.01 * owed + files * FILE_OVERHEAD


@pytest.fixture(scope="module", params=[2, 3], ids=["ZeRO-2", "ZeRO-3"])
def checkpoint(request, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    run_ranks(save, 2, base("llama").path, scale("adapt"), folder, 1, zero(request.param))
    return checkpoint_in(folder)


@pytest.fixture
def copied(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


def tensor_files(checkpoint):
    return sorted(file for file in checkpoint.glob("*_states.pt"))


def test_a_missing_file_is_named(copied, base):
    for file in tensor_files(copied):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=r"rank|no such file") as error:
            open_trained(copied, base("llama").path)
        assert str(copied) in str(error.value) and "\n" not in str(error.value)
        file.write_bytes(content)
    open_trained(copied, base("llama").path)


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_file_cut_short_is_named(keep, copied, base):
    for file in tensor_files(copied):
        content = file.read_bytes()
        file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
        with pytest.raises(CheckpointError) as error:
            open_trained(copied, base("llama").path)
        assert str(file) in str(error.value) and "\n" not in str(error.value)
        file.write_bytes(content)


def test_a_file_of_something_else_is_named(copied, base):
    for file in tensor_files(copied):
        content = file.read_bytes()
        for value in ([1, 2], {}, {"optimizer_state_dict": {"zero_stage": 3}}, {"optimizer_state_dict": 5}):
            torch.save(value, file)
            with pytest.raises(CheckpointError, match=r"laid out|no such file") as error:
                open_trained(copied, base("llama").path)
            assert str(copied) in str(error.value) and "\n" not in str(error.value)
        file.write_bytes(content)


def test_another_base_is_refused(checkpoint, base, tmp_path):
    with pytest.raises(BaseModelError, match="other weights"):
        open_trained(checkpoint, base("llama biases").path)


def test_a_checkpoint_of_another_method_is_refused(copied, base):
    manifest = copied / "manifest.json"
    text = manifest.read_text()
    assert '"collaborative_modules": "attention"' in text
    manifest.write_text(text.replace('"collaborative_modules": "attention"', '"collaborative_modules": "both"'))
    with pytest.raises(CheckpointError, match=r"lacks layers\.1\.ffn\.down\.expansion_to_base\.weight"):
        open_trained(copied, base("llama").path)
    manifest.write_text(
        text.replace('"variant": "adapt"', '"variant": "preserve"').replace('"l_fp": 1', '"l_fp": null')
    )
    with pytest.raises(CheckpointError, match="has not"):
        open_trained(copied, base("llama").path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run": {"method": 3}}'])
def test_a_damaged_manifest_is_named(text, copied, base):
    (copied / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_trained(copied, base("llama").path)
