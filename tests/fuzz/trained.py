"""What training leaves, and what is copied between machines: checkpoints, expansions and gates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.folder import candidates
from pipeline.checkpoint.manifest import (
    CheckpointFile,
    CheckpointManifest,
    LayoutRecord,
    check_file,
    describe_run,
    load_manifest,
)
from pipeline.checkpoint.position import Position
from pipeline.checkpoint.rank_files import RankState, rank_file, read_random_state, write_rank_file
from pipeline.checkpoint.trained_model import open_trained
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import CheckpointError
from pipeline.expansion_folder import open_expansion
from pipeline.files.hashes import file_hash
from pipeline.gating.folder import HeldoutText, open_gate, write_gate
from pipeline.gating.gate import FittedGate
from pipeline.methods.scale import Scale, upscale
from pipeline.model.from_hf import open_base
from pipeline.parallel.parameters import named_trained_parameters
from pipeline.parallel.topology import SINGLE
from tests.bases import STORIES
from tests.extensions.gate.gates import gate_record
from tests.fuzz.runner import INPUT, Subject
from tests.training.runs import write_config
from tests.widened import SEED, scale_settings, widened

RANKS = 2
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
STEP = 4
EXPANSION = scale_settings("adapt", collaborative_modules="both")


def _hash_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names and values."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].detach().contiguous().numpy().tobytes())
    return total.hexdigest()


# Checkpoints


def _run() -> tuple[RunConfig, ScaleMethod]:
    config = load_config(write_config(Path("run"), Path("tokens")))
    assert isinstance(config.method, ScaleMethod)
    return config, config.method


def _make_checkpoint() -> None:
    """A checkpoint of two data-parallel ranks, each with one half of every parameter."""
    config, method = _run()
    base = open_base(STORIES)
    model = widened(base, method, noise=0.05)
    folder = INPUT / f"step_{STEP:08d}"
    folder.mkdir(parents=True)
    for rank in range(RANKS):
        first: dict[str, int] = {}
        values: dict[str, Tensor] = {}
        for name, parameter in named_trained_parameters(model):
            flat = parameter.detach().flatten()
            half = -(-len(flat) // RANKS)
            own = flat[rank * half : (rank + 1) * half]
            first[name] = rank * half
            # In the order in which a rank's file has them: the weights, then the moments.
            values |= {
                f"{name}/fp32": own,
                f"{name}/exp_avg": own / 10,
                f"{name}/exp_avg_sq": own.square(),
            }
        random_state = {"cpu": torch.get_rng_state()}
        state = RankState(0, 1, first, values, torch.tensor(float(STEP)), random_state)
        write_rank_file(rank_file(folder, rank), state)

    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = CheckpointFile(bytes=path.stat().st_size, sha256=file_hash(path))
    manifest = CheckpointManifest(
        run=describe_run(config, base, model, "none"),
        position=Position(step=STEP, tokens_seen=STEP * 256, seconds=1.0),
        layout=LayoutRecord(
            world_size=RANKS, tp_size=1, dp_size=RANKS, zero_stage=1, dtype="float32"
        ),
        files=files,
    )
    manifest.save(folder)
    (INPUT / "latest").write_text(f"{folder.name}\n", encoding="utf-8")


def _read_checkpoint() -> str:
    """Reads all that a resume reads: the newest checkpoint, its files' hashes, weights, moments and
    random states."""
    found = candidates(INPUT)
    if not found:
        raise CheckpointError(
            f"{INPUT}: no checkpoint is whole"
        )  # as a run says it that has checkpoints
    checkpoint = found[0]
    manifest = load_manifest(checkpoint)
    for name in manifest.files:
        check_file(manifest, checkpoint, name)
    reader = open_trained(checkpoint, STORIES).reader
    tensors = {"adam_step": reader.adam_step(reader.names[0])}
    for name in reader.names:
        for kind in KINDS:
            tensors[f"{name}/{kind}"] = reader.read(name, kind)
    for rank in range(RANKS):
        for device, state in read_random_state(checkpoint, rank).items():
            tensors[f"random/{rank}/{device}"] = state
    return f"{manifest.position.step} {_hash_of(tensors)}"


# Expansions


def _make_expansion() -> None:
    upscale(EXPANSION, open_base(STORIES), INPUT, SEED)


def _read_expansion() -> str:
    """Reads it as a run does that begins with it."""
    base = open_base(STORIES)
    expansion = open_expansion(INPUT)
    expansion.check_files()
    expansion.check_origin(base.hashes, EXPANSION.initial_expansion_settings, SEED)
    method = Scale(EXPANSION, INPUT, SEED)
    model = method.build(base.spec, SINGLE, "none")
    method.load(model, base, SINGLE)
    return _hash_of(dict(model.named_parameters()))


# Gates


def _make_gate() -> None:
    random = torch.Generator().manual_seed(3)
    mean, std, weight = torch.rand(3, 128, generator=random)
    gate = FittedGate(2, "token+running_mean", mean, std, weight, bias=0.3, threshold=0.5)
    heldout = HeldoutText(
        role="new",
        sequences=5,
        tokens=160,
        open_fraction=0.9,
        closed_sequences=0,
        base_perplexity=9.0,
        ungated_perplexity=3.0,
        gated_perplexity=3.1,
    )
    record = gate_record(
        request={"settings": {"layer": 2}, "checkpoint": "0" * 64},
        layer=gate.layer,
        features=gate.features,
        bias=gate.bias,
        threshold=gate.threshold,
        heldout={"korean": heldout},
    )
    write_gate(INPUT, gate, record)


def _read_gate() -> str:
    gate, record = open_gate(INPUT)
    return f"{_hash_of(gate.tensors)} {record.model_dump_json()}"


def subjects() -> Iterator[Subject]:
    """Each reader twice: the values of JSON that no hash guards may change what is read, but end in
    no
    traceback.

    A gate's record holds a checksum, so that a value changed by hand is noticed.
    """
    for target, make, read in (
        ("checkpoints", _make_checkpoint, _read_checkpoint),
        ("expansions", _make_expansion, _read_expansion),
        ("gates", _make_gate, _read_gate),
    ):
        yield Subject(target, "bytes", make, read, exact=True)
        guarded = target == "gates"
        yield Subject(target, "values", make, read, exact=guarded, guarded=guarded)
