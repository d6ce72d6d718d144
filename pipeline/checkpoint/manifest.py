"""A checkpoint's manifest.json: base, method, position in the run, parallel layout, and the hash of every file."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.config.data import Data
from pipeline.config.method import Method
from pipeline.config.reading import flattened, with_defaults
from pipeline.config.run import BasePrecision, RunConfig
from pipeline.errors import CheckpointError, CheckpointStorageError, DamagedCheckpointError
from pipeline.files import FolderKind, file_hash, first_fault, is_plain_name, read_bytes, write_json
from pipeline.hub import source_of
from pipeline.model.architecture import architecture_of, changed_entry
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.parallel.topology import Layout

MANIFEST_FILE = "manifest.json"
FORMAT: Literal["scale-cpt checkpoint 3"] = "scale-cpt checkpoint 3"
CHECKPOINT = FolderKind("a checkpoint", MANIFEST_FILE, FORMAT)
_USE_ANOTHER = (
    "use another checkpoint: for a run, write its name into the file `latest` in the same folder"
)
SAME_MODEL = ("method", "base_precision")
SAME_OVER_A_RUN = (
    *SAME_MODEL,
    "expansion",
    "optimizer",
    "global_batch_size",
    "seed",
    "tokenizer_fingerprint",
    "data",
)
_CORPUS = {"input": True, "clean": True, "heldout_input": True, "sample": {"prompts"}}
PATHS: Any = {"folder": True, "corpora": {"__all__": _CORPUS}}


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepRecord(NamedTuple):
    """What the detection of loss spikes needs of a step: its number, loss, and gradient norm before clipping."""

    step: int
    loss: float
    gradient_norm: float


class Position(_Record):
    """The progress of a run, and everything needed to resume it exactly. Immutable: `changed` returns a copy.

    A step's samples depend on its number alone, so the position needs no record of the data read.

    Attributes:
        step, tokens_seen: the steps completed so far, including those that were skipped.
        seconds: the time spent in training steps, over all attempts.
        skipped_steps: the numbers, from 1, of the steps that must not change the weights: their loss or gradient was
            not finite, or a rollback excluded them.
        recomputed_steps: how many were computed twice, and were finite the second time.
        rollbacks: how often the run went back to a checkpoint because of a spike.
        learning_rate_factor: what the schedule's rate is multiplied by; a forgetting budget lowers it.
        initial_nll_per_token: of each held-out corpus before the first step: forgetting is measured from there.
        recent: the last steps that changed the weights, oldest first.
    """

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    skipped_steps: tuple[int, ...] = ()
    recomputed_steps: int = 0
    rollbacks: int = 0
    learning_rate_factor: float = 1.0
    initial_nll_per_token: dict[str, float] = {}
    recent: tuple[StepRecord, ...] = ()

    def changed(self, **changes: object) -> Position:
        return self.model_copy(update=changes)

    def skipping(self, *steps: int) -> Position:
        """A copy with `steps` added to those that are skipped."""
        return self.changed(skipped_steps=tuple(sorted({*self.skipped_steps, *steps})))


class BaseRecord(_Record):
    """The base, which the checkpoint does not hold: its path, the SHA-256 of each weight file, and its architecture.

    `hub` is where a base from the Hugging Face hub came from, `org/name@commit`. `architecture` is None in a checkpoint
    of an earlier version.
    """

    path: str
    hashes: dict[str, str]
    hub: str | None = None
    architecture: dict[str, Any] | None = None


class LayoutRecord(_Record):
    """The parallel layout that wrote the files."""

    world_size: int
    tp_size: int
    dp_size: int
    zero_stage: int
    dtype: str


class RunRecord(_Record):
    """What stays the same over a run.

    `method` and `data` are those sections of the run configuration, without paths; `expansion` holds the added widths,
    or is None if nothing is added. `new_rows` is how many rows the extended vocabulary of the folder `vocabulary` has.
    `corpora` holds a hash of the tokens of each corpus that is read, by the name of its folder; None in a checkpoint of
    an earlier version.
    """

    name: str
    base: BaseRecord
    base_precision: BasePrecision = "bf16"
    method: dict[str, Any]
    expansion: dict[str, int] | None
    data: dict[str, Any]
    corpora: dict[str, str] | None = None
    global_batch_size: int
    optimizer: str = "adamw"
    seed: int
    tokenizer_fingerprint: str
    vocabulary: str | None = None
    new_rows: int = 0


class FileRecord(_Record):
    """One file of the checkpoint."""

    bytes: int
    sha256: str


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
    }


class Manifest(_Record):
    """The contents of a checkpoint's manifest.json, which is written last."""

    format: Literal["scale-cpt checkpoint 3"] = FORMAT
    run: RunRecord
    position: Position
    layout: LayoutRecord
    versions: dict[str, str] = Field(default_factory=_versions)
    files: dict[str, FileRecord]

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST_FILE, self.model_dump(mode="json"))


def describe_run(
    config: RunConfig,
    base: BaseFolder,
    model: Decoder,
    tokenizer_fingerprint: str,
    corpora: Mapping[str, str] | None = None,
) -> RunRecord:
    """The record of the run `config`; `corpora` are the hashes of what it reads, None where nothing is read."""
    return RunRecord(
        name=config.name,
        base=BaseRecord(
            path=str(config.base),
            hashes=base.hashes,
            hub=source_of(config.base),
            architecture=architecture_of(base.spec),
        ),
        base_precision=config.base_precision,
        method=config.method.model_dump(mode="json"),
        expansion=None if model.plan is None else asdict(model.plan.expansion),
        data=config.data.model_dump(mode="json", exclude=PATHS),
        corpora=None if corpora is None else dict(corpora),
        global_batch_size=config.schedule.global_batch_size,
        optimizer=config.schedule.optimizer,
        seed=config.seed,
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocabulary=None if config.vocabulary is None else str(config.vocabulary.folder),
        new_rows=base.spec.new_tokens,
    )


def describe_layout(layout: Layout, zero_stage: int, dtype: torch.dtype) -> LayoutRecord:
    return LayoutRecord(
        world_size=layout.world_size,
        tp_size=layout.tp_size,
        dp_size=layout.dp_size,
        zero_stage=zero_stage,
        dtype=str(dtype).removeprefix("torch."),
    )


def load_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the checkpoint in `folder`.

    Raises DamagedCheckpointError if it is missing or damaged, CheckpointError if it is of another version or malicious.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = Manifest.model_validate_json(read_bytes(path, CheckpointError, _USE_ANOTHER))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path}: no such file; expected a run's folder or one of its checkpoints, such as "
            "checkpoints/step_00000500"
        ) from None
    except ValidationError as error:
        of_another_version = error.errors()[0]["loc"] == ("format",)
        kind = CheckpointError if of_another_version else DamagedCheckpointError
        raise kind(f"{path}: not a checkpoint's manifest: {first_fault(error)}") from None
    if not all(map(is_plain_name, manifest.files)):
        raise CheckpointError(f"{path}: names files outside its folder; do not use this checkpoint")
    return manifest


def check_file(manifest: Manifest, folder: Path, name: str) -> None:
    """Checks that the file `name` of a checkpoint is, byte for byte, what was written.

    Raises DamagedCheckpointError if it is not, CheckpointStorageError if this node does not see the whole checkpoint.
    """
    path, record = folder / name, manifest.files[name]
    try:
        if path.stat().st_size == record.bytes and file_hash(path) == record.sha256:
            return
    except FileNotFoundError:
        if not (folder / MANIFEST_FILE).exists():
            raise CheckpointStorageError(
                f"{folder}: not visible on {socket.gethostname()}; check the file system there, then start again"
            ) from None
    raise DamagedCheckpointError(f"{path}: missing, or not what was written; {_USE_ANOTHER}")


def check_same_run(
    manifest: Manifest, folder: Path, run: RunRecord, names: tuple[str, ...] = SAME_OVER_A_RUN
) -> None:
    """Checks that a run can resume from a checkpoint: that `names` of it and the base are the same.

    With its `data` go the corpora. Otherwise raises CheckpointError. The layout may differ. Settings that did not exist
    when the checkpoint was saved have their defaults; what it does not record (`not_recorded`) is not compared.
    """
    if manifest.run.base.hashes != run.base.hashes:
        raise CheckpointError(
            f"{folder}: its base {manifest.run.base.path} had other weights than the configuration's base has; "
            "point `base` at that model, or start a run in another folder"
        )
    if changed := changed_entry(manifest.run.base.architecture, run.base.architecture):
        raise CheckpointError(
            f"{folder}: the config.json of its base {manifest.run.base.path} had another {changed}; put it back as it "
            "was, or start a run in another folder"
        )
    saved, wanted = (_compared(record, names) for record in (manifest.run, run))
    if others := [name for name in saved | wanted if saved.get(name) != wanted.get(name)]:
        name, more = others[0], f" and {len(others) - 1} other settings" if len(others) > 1 else ""
        raise CheckpointError(
            f"{folder}: was trained with another {name} (expected {saved.get(name)!r}, found {wanted.get(name)!r})"
            f"{more}; set it back, or name another `folder` in the configuration, where a new run begins"
        )
    if "data" in names:
        _check_same_corpora(manifest, folder, run)


def _check_same_corpora(manifest: Manifest, folder: Path, run: RunRecord) -> None:
    """Raises CheckpointError where a corpus holds other tokens than the one that the checkpoint was trained on.

    Which corpora there are is a setting, and compared with the settings.
    """
    before, now = manifest.run.corpora or {}, run.corpora or {}
    others = [name for name in before if name in now and before[name] != now[name]]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(
            f"{folder}: was trained when the corpus {others[0]}{more} held other tokens than it holds now; put that "
            "corpus back (make it again of the same files), or name another `folder` in the configuration, where a "
            "new run begins"
        )


def not_recorded(manifest: Manifest) -> list[str]:
    """What a checkpoint of an earlier version does not record, so that nobody can tell whether it changed."""
    run = manifest.run
    lacks = {
        "the config.json of its base": run.base.architecture is None,
        "the tokens of its corpora": run.corpora is None,
    }
    return [what for what, is_lacking in lacks.items() if is_lacking]


def _compared(run: RunRecord, names: tuple[str, ...]) -> dict[str, Any]:
    """The settings `names` of a run by their dotted names, without where its corpora come from."""
    corpora = {name: _with_files(corpus) for name, corpus in run.data["corpora"].items()}
    data = with_defaults(Data, run.data | {"folder": "-", "corpora": corpora})
    record = run.model_dump() | {"data": data, "method": with_defaults(Method, run.method)}
    return dict(flattened({name: record[name] for name in names}))


def _with_files(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a corpus without its source, and with names for its files: without these it is not valid."""
    files: dict[str, Any] = {"input": ["-"]}
    if sample := corpus.get("sample"):
        files = {"sample": {**sample, "prompts": ["-"]}}
    return {name: value for name, value in corpus.items() if name != "source"} | files
