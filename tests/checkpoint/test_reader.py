"""Checkpoints of real DeepSpeed runs, read back without DeepSpeed: bit-identical, at every layout."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.reader import CheckpointReader
from pipeline.conversion.trained_model import open_trained
from pipeline.errors import BaseModelError, CheckpointError
from pipeline.parallel.sharding import Partition, merge, partition_of
from tests.bases import STORIES
from tests.conversion.checkpoints import FFT, Account, checkpoint_in, save, save_many, scale, trained, zero
from tests.distributed import run_ranks

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ZeRO-2, dp 2": (2, 1, zero(2)),
    "ZeRO-3, dp 3, several flat tensors": (3, 1, zero(3, sub_group_size=600)),
    "ZeRO-3, tp 2 x dp 2": (4, 2, zero(3)),
    "ZeRO-1, tp 4, shared key/value heads": (4, 4, zero(1)),
    "ZeRO-1, dp 2, bf16": (2, 1, zero(1, "bf16")),
    "ZeRO-3, dp 2, bf16": (2, 1, zero(3, "bf16")),
}
METHODS = {"route": scale("route"), "fft": FFT}
STAGES = [1, 2, 3]
FILE_OVERHEAD = 2**16
"""Names, shapes and the archive's own table, in bytes."""


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """The folder of each layout and method, and what each rank held."""
    folder = tmp_path_factory.mktemp("layouts")
    accounts = {}
    for world_size in {world_size for world_size, _, _ in LAYOUTS.values()}:
        jobs = {
            (layout, name): (base("llama").path, method, folder / f"{index}-{name}", tp_size, values)
            for index, (layout, (size, tp_size, values)) in enumerate(LAYOUTS.items())
            for name, method in METHODS.items()
            if size == world_size
        }
        ranks = run_ranks(save_with_accounts, world_size, [*jobs.values()])
        accounts.update({key: (job[2], held) for key, job, *held in zip(jobs, jobs.values(), *ranks, strict=True)})
    return accounts


def save_with_accounts(jobs: list[tuple[Any, ...]]) -> list[Account | None]:
    """As `save_many`; returns what this rank held of each."""
    return [save(*job, account=True) for job in jobs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_and_moment_is_read_back(layout, base, saved):
    world_size, tp_size, _ = LAYOUTS[layout]
    for name in METHODS:
        folder, ranks = saved[layout, name]
        model = trained(base("llama").path, folder)
        assert (model.reader.dp_size, model.reader.tp_size) == (world_size // tp_size, tp_size)
        partitions = {name: partition_of(parameter) for name, parameter in model.structure.named_parameters()}
        check(model.reader, ranks[:tp_size], partitions)


def check(reader: CheckpointReader, shards: list[Account], split: dict[str, Partition]) -> None:
    """Compares with what each tensor-parallel rank held."""
    assert set(reader.names) == set(shards[0]["fp32"])
    for name in reader.names:
        size = reader.read(name).shape[split[name].dim or 0]
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            expected = merge([shard[kind][name] for shard in shards], split[name], size)
            found = reader.read(name, None if kind == "fp32" else kind)
            assert found.dtype == torch.float32
            assert torch.equal(found, expected), (name, kind)
    assert any(reader.read(name, "exp_avg_sq").any() for name in reader.names)


@pytest.fixture(scope="module")
def others(base, tmp_path_factory):
    """Two kinds of checkpoint, each by ZeRO stage: of stories260K in bf16, and of a small base."""
    folder = tmp_path_factory.mktemp("others")
    jobs = [(STORIES, scale("adapt"), folder / f"stories-{stage}", 1, zero(stage, "bf16")) for stage in STAGES]
    jobs += [(base("llama").path, scale("adapt"), folder / f"small-{stage}", 1, zero(stage)) for stage in STAGES[1:]]
    run_ranks(save_many, 2, jobs)
    return lambda kind, stage: folder / f"{kind}-{stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_what_trained_once(stage, others):
    """12 bytes a trained parameter; of the base nothing, though it ties its embedding, which DeepSpeed would write."""
    model = trained(STORIES, others("stories", stage))
    assert model.spec.tie_word_embeddings
    owed = 12 * sum(math.prod(model.shapes[name]) for name in model.trained)
    written = sum(file.stat().st_size for file in model.checkpoint.glob("*_states.pt"))
    files = len(list(model.checkpoint.glob("*_states.pt")))
    assert owed < written < 1.01 * owed + files * FILE_OVERHEAD


@pytest.fixture(scope="module", params=STAGES[1:], ids=["ZeRO-2", "ZeRO-3"])
def checkpoint(request, others):
    return checkpoint_in(others("small", request.param))


@pytest.fixture
def copied(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "a list": lambda file: torch.save([1, 2], file),
    "an empty table": lambda file: torch.save({}, file),
    "half a table": lambda file: torch.save({"optimizer_state_dict": {"zero_stage": 3}}, file),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(damage, copied, base):
    """Of those that are read: under ZeRO-3 the ranks' files of the model are alike."""
    for file in {*copied.glob("*_states.pt")} - {*copied.glob("zero_pp_rank_1_*_model_states.pt")}:
        content = file.read_bytes()
        DAMAGE[damage](file)
        with pytest.raises(CheckpointError) as error:
            open_trained(copied, base("llama").path)
        assert str(copied) in str(error.value) and "\n" not in str(error.value)
        file.write_bytes(content)
    open_trained(copied, base("llama").path)


def test_another_base_is_refused(checkpoint, base):
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
    with pytest.raises(CheckpointError, match="unknown to the model"):
        open_trained(copied, base("llama").path)


@pytest.mark.parametrize("text", ["{", "[]", '{"run": {"method": 3}}'])
def test_a_damaged_manifest_is_named(text, copied, base):
    (copied / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_trained(copied, base("llama").path)
