"""Base folders and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.folder import all_checkpoints, candidates, publish, unfinished
from pipeline.checkpoint.manifest import (
    FileRecord,
    LayoutRecord,
    Manifest,
    Position,
    check_file,
    describe_run,
    load_manifest,
    versions,
)
from pipeline.checkpoint.torch_files import write_torch_file
from pipeline.config.run import parse_config
from pipeline.conversion.trained_model import open_trained
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import DamagedCheckpointError
from pipeline.files import file_hash
from pipeline.methods.vocabulary import check_vocabulary
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base
from pipeline.parallel.sharding import named_trained_parameters
from pipeline.run_folder.attempts import newest_checkpoint_step
from tests.bases import CONFIGS, random_model
from tests.fuzz.corpora import make_tokenizer
from tests.fuzz.runner import INPUT, Subject, digest
from tests.widened import scale_settings, widened

_BASE = Path("base")
_ADAPT = scale_settings("adapt", collaborative_modules="both")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().float().contiguous().numpy().tobytes()


def _model_digest(model: torch.nn.Module) -> str:
    return digest(_bytes(parameter) for _, parameter in sorted(model.named_parameters()))


# Base folders


def _save_model(kind: str, folder: Path, **options: Any) -> None:
    config = type(CONFIGS[kind]).from_dict({**CONFIGS[kind].to_dict(), "vocab_size": 320})
    random_model(config).save_pretrained(folder, **options)


def _make_base(kind: str, options: Mapping[str, Any]) -> None:
    make_tokenizer(INPUT)
    _save_model(kind, INPUT, **options)


def _read_base() -> dict[str, str]:
    base = open_base(INPUT)
    check_vocabulary(load_tokenizer(INPUT), base.spec)
    with torch.device("meta"):
        Decoder(base.spec)
    model = Decoder(base.spec)
    load_base(model, base)
    return {"weights": _model_digest(model)}


# Checkpoints

_RANKS = 2


def _make_checkpoints() -> None:
    """Two checkpoints in the layout of DeepSpeed's ZeRO-3 on two ranks."""
    _save_model("llama", _BASE)
    base = open_base(_BASE)
    model = widened(base, _ADAPT, noise=0.05)
    corpora = {"new": {"input": ["unused"]}}
    config = parse_config(
        {
            "name": "fuzz", "folder": "run", "base": str(_BASE), "method": _ADAPT.model_dump(mode="json"),
            "data": {"folder": "unused", "sequence_length": 12, "corpora": corpora},
            "schedule": {"steps": 4, "global_batch_size": 2, "micro_batch_size": 1, "learning_rate": 1e-2},
            "deepspeed": "unused",
        },
        source="fuzz",
    )  # fmt: skip
    run = describe_run(config, base, model, "none")
    layout = LayoutRecord(world_size=_RANKS, tp_size=1, dp_size=_RANKS, zero_stage=3, dtype="float32")
    trained = dict(named_trained_parameters(model))
    for step in (2, 4):
        final = INPUT / f"step_{step:08d}"
        folder = unfinished(final)
        folder.mkdir(parents=True)
        for rank in range(_RANKS):
            _write_rank(folder, rank, {name: tensor.detach() * step for name, tensor in trained.items()})
        files = {
            path.name: FileRecord(bytes=path.stat().st_size, sha256=file_hash(path))
            for path in sorted(folder.iterdir())
        }
        position = Position(step=step, tokens_seen=24 * step, seconds=1.0)
        Manifest(run=run, position=position, layout=layout, versions=versions(), files=files).save(folder)
        publish(folder, final)


def _write_rank(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    pieces = []
    for tensor in tensors.values():
        size = -(-tensor.numel() // _RANKS)
        padded = torch.zeros(size * _RANKS)
        padded[: tensor.numel()] = tensor.flatten()
        pieces.append(padded[rank * size : (rank + 1) * size])
    flat = torch.cat(pieces)
    moments = {"step": torch.tensor(2.0), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}
    optimizer = {"zero_stage": 3, "fp32_flat_groups": [flat], "optimizer_state_dict": {"state": {0: moments}}}
    shapes = [{name: tensor.shape for name, tensor in tensors.items()}]
    stem = f"zero_pp_rank_{rank}_mp_rank_00"
    write_torch_file(folder / f"{stem}_optim_states.pt", {"optimizer_state_dict": optimizer})
    write_torch_file(folder / f"{stem}_model_states.pt", {"param_shapes": shapes})
    write_torch_file(folder / f"random_state_rank_{rank:05d}.pt", {"cpu": torch.get_rng_state()})


def _checkpoint_digest(checkpoint: Path) -> str:
    reader = open_trained(checkpoint, _BASE).reader
    parts = [_bytes(reader.read(name, moment)) for name in reader.names for moment in (None, "exp_avg", "exp_avg_sq")]
    return digest([*parts, _bytes(reader.adam_step)])


def _resume() -> dict[str, str]:
    """Chooses the checkpoint to resume from, as a run does, and reads all of it."""
    newest_checkpoint_step(INPUT.parent)
    for checkpoint in candidates(INPUT):
        try:
            manifest = load_manifest(checkpoint)
            for name in manifest.files:
                check_file(manifest, checkpoint, name)
        except DamagedCheckpointError:
            continue
        return {checkpoint.name: _checkpoint_digest(checkpoint)}
    return {}


def _resume_each() -> dict[str, str]:
    return {checkpoint.name: _checkpoint_digest(checkpoint) for checkpoint in all_checkpoints(INPUT)}


def _subjects() -> Iterator[Subject]:
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama in several files": ("llama", {"max_shard_size": "40KB"}),
        "phi3": ("phi3", {}),
        "gemma3": ("gemma3", {}),
        "neox": ("neox", {}),
    }
    for name, (kind, options) in kinds.items():
        yield Subject("base folders", name, partial(_make_base, kind, options), _read_base)
    yield Subject("checkpoints", "resume", _make_checkpoints, _resume, exact=True, truth=_resume_each)


SUBJECTS = list(_subjects())
