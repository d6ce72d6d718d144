"""A checkpoint's manifest.json: the run, its position, the parallel layout, the files' hashes."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, ValidationError

from pipeline.checkpoint.position import ManifestSection, Position
from pipeline.config.base import BasePrecision, Fp8Scaling
from pipeline.config.data import Data
from pipeline.config.method import Method, recorded_method
from pipeline.config.reading import (
    flattened,
    with_defaults,
    with_new_names,
    with_todays_kinds,
)
from pipeline.config.run import RunConfig
from pipeline.config.stage_plan import training_stages
from pipeline.config.stages import proportions
from pipeline.errors import CheckpointError, CheckpointStorageError, DamagedCheckpointError
from pipeline.expansion_folder import ExpansionFolder
from pipeline.files.folders import FolderKind
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import (
    CHECKSUM,
    check_checksum,
    first_fault,
    parse_object,
    write_record,
)
from pipeline.files.reading import is_plain_name, read_bytes
from pipeline.hub import source_of
from pipeline.model.architecture import architecture_of, changed_entry
from pipeline.model.base_folder import BaseFolder
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout
from pipeline.scale.plan import added_widths

MANIFEST_FILE = "manifest.json"
# A new entry with a default keeps the version: older checkpoints still load.
FORMAT: Literal["scale-cpt checkpoint 3"] = "scale-cpt checkpoint 3"
CHECKPOINT = FolderKind("a checkpoint", MANIFEST_FILE, FORMAT)
_USE_ANOTHER = (
    "use another checkpoint: for a run, write its name into the file `latest` in the same folder"
)
# Settings that a checkpoint and the run that uses it must have in common: SAME_MODEL to build its
# model, SAME_OVER_A_RUN to continue the run.
SAME_MODEL = ("method", "base_precision", "fp8", "is_hosted")
SAME_OVER_A_RUN = (
    *SAME_MODEL,
    "expansion",
    "optimizer",
    "global_batch_size",
    "seed",
    "tokenizer_fingerprint",
    "data",
)
_SECTION = {"optimizer": "schedule.", "global_batch_size": "schedule."}
"""Before these names in the configuration, which a record has beside its sections."""
# Where files are may change during a run: the record of a run leaves paths out.
_CORPUS = {"input": True, "clean": True, "heldout_input": True, "sample": {"prompts"}}
PATHS: Any = {"folder": True, "corpora": {"__all__": _CORPUS}}


class BaseRecord(ManifestSection):
    """The base, which the checkpoint refers to and does not hold.

    Attributes:
        hashes: the SHA-256 of each weight file.
        hub: `org/name@commit` of a base from the Hugging Face hub.
        architecture: None in a checkpoint of an earlier version.
    """

    path: str
    hashes: dict[str, str]
    hub: str | None = None
    architecture: dict[str, Any] | None = None


class LayoutRecord(ManifestSection):
    """The parallel layout that wrote the files."""

    world_size: int
    tp_size: int
    dp_size: int
    zero_stage: int
    dtype: str


class StageRecord(ManifestSection):
    """What a stage of a run trains, and on which samples; its rates may change.

    Attributes:
        weights: of the corpora that it reads.
        fractions: of the samples, by the role of their corpora.
    """

    name: str
    steps: int
    trains: Annotated[tuple[str, ...], AfterValidator(with_todays_kinds)]
    global_batch_size: int
    sequence_length: int
    weights: dict[str, float]
    fractions: dict[str, float]
    passage_steps: int


class Fp8Record(ManifestSection):
    """How a base in fp8 is stored: with other scales it is another base.

    By default as in checkpoints from before there was a choice, and in those of any other base.
    """

    scaling: Fp8Scaling = "row"


class RunRecord(ManifestSection):
    """What stays the same over a run.

    Attributes:
        fp8: of a base in fp8, how it is stored.
        is_hosted: whether transformers computes the base (`base_code`).
        method: the section of the run configuration, with today's names of its settings.
        expansion: the added widths; None if nothing is added.
        data: the section of the run configuration, without paths.
        corpora: a hash of the tokens of each corpus that is read, by the name of its folder; None
            in a checkpoint of an earlier version.
        vocabulary: the folder of the extended vocabulary.
        new_rows: how many tokens that vocabulary adds.
        own_tokens: the ids that have rows of their own; None without open rows.
        stages: empty in a run without stages. Those that are yet to begin may change.
    """

    name: str
    base: BaseRecord
    base_precision: BasePrecision = "bf16"
    fp8: Fp8Record = Fp8Record()
    is_hosted: bool = False
    method: Annotated[dict[str, Any], AfterValidator(recorded_method)]
    expansion: dict[str, int] | None
    data: dict[str, Any]
    corpora: dict[str, str] | None = None
    global_batch_size: int
    optimizer: str = "adamw"
    seed: int
    tokenizer_fingerprint: str
    vocabulary: str | None = None
    new_rows: int = 0
    own_tokens: tuple[int, ...] | None = None
    stages: tuple[StageRecord, ...] = ()


class CheckpointFile(ManifestSection):
    """One file of the checkpoint."""

    bytes: int
    sha256: str


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
    }


class CheckpointManifest(ManifestSection):
    """The contents of a checkpoint's manifest.json, which is written last."""

    format: Literal["scale-cpt checkpoint 3"] = FORMAT
    run: RunRecord
    position: Position
    layout: LayoutRecord
    # For those who look into a checkpoint; nothing compares them.
    versions: dict[str, str] = Field(default_factory=_versions)
    files: dict[str, CheckpointFile]

    def save(self, folder: Path) -> None:
        """Writes manifest.json into `folder`, with a checksum of its content."""
        write_record(folder / MANIFEST_FILE, self)


def describe_model(config: RunConfig, spec: DecoderSpec) -> dict[str, Any]:
    """The settings that change what trained weights compute, by their names in `SAME_MODEL`."""
    fp8 = Fp8Record()
    if config.base_precision == "fp8":
        fp8 = Fp8Record(scaling=config.fp8.scaling)
    return {
        "method": config.method.model_dump(mode="json"),
        "base_precision": config.base_precision,
        "fp8": fp8.model_dump(),
        "is_hosted": not spec.is_native,
    }


def describe_run(
    config: RunConfig,
    base: BaseFolder,
    model: CausalDecoder,
    tokenizer_fingerprint: str,
    corpora: Mapping[str, str] | None = None,
) -> RunRecord:
    """The record of the run `config`.

    `corpora` are the hashes of the corpora that it reads; None where nothing is read.
    """
    expansion = None
    widths = added_widths(model.plan)
    if widths is not None:
        expansion = asdict(widths)
    own_tokens = None
    if model.plan is not None and model.plan.own is not None:
        own_tokens = model.plan.own.tokens
    vocabulary = None
    if config.vocabulary is not None:
        vocabulary = str(config.vocabulary.folder)
    return RunRecord(
        name=config.name,
        base=BaseRecord(
            path=str(config.base),
            hashes=base.hashes,
            hub=source_of(config.base),
            architecture=architecture_of(base.spec),
        ),
        **describe_model(config, base.spec),
        expansion=expansion,
        data=config.data.model_dump(mode="json", exclude=PATHS),
        corpora=None if corpora is None else dict(corpora),
        global_batch_size=config.schedule.global_batch_size,
        optimizer=config.schedule.optimizer,
        seed=config.seed,
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocabulary=vocabulary,
        new_rows=base.spec.new_tokens,
        own_tokens=own_tokens,
        stages=_describe_stages(config),
    )


def _describe_stages(config: RunConfig) -> tuple[StageRecord, ...]:
    """The records of a run's stages; none for a run without stages."""
    if not config.stages:
        return ()
    records: list[StageRecord] = []
    for stage, settings in zip(training_stages(config), config.stages, strict=True):
        weights, fractions = proportions(stage.config.data)
        records.append(
            StageRecord(
                name=stage.name,
                steps=stage.steps,
                trains=tuple(settings.trains),
                global_batch_size=stage.config.schedule.global_batch_size,
                sequence_length=stage.config.data.sequence_length,
                weights=weights,
                fractions=fractions,
                passage_steps=stage.passage_steps,
            )
        )
    return tuple(records)


def describe_layout(layout: Layout, zero_stage: int, dtype: torch.dtype) -> LayoutRecord:
    return LayoutRecord(
        world_size=layout.world_size,
        tp_size=layout.tp_size,
        dp_size=layout.dp_size,
        zero_stage=zero_stage,
        dtype=str(dtype).removeprefix("torch."),
    )


def load_manifest(folder: Path) -> CheckpointManifest:
    """Reads the manifest of the checkpoint in `folder`.

    Manifests of earlier versions have no checksum, and are read without one.

    Raises:
        DamagedCheckpointError: it is missing, damaged, or was changed after it was written.
        CheckpointError: it cannot be read, is of another version, or names files elsewhere.
    """
    path = folder / MANIFEST_FILE
    try:
        data = read_bytes(path, CheckpointError, _USE_ANOTHER)
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path}: no such file; expected a run's folder or one of its checkpoints, such as "
            "checkpoints/step_00000500"
        ) from None
    content = parse_object(data, path, DamagedCheckpointError, _USE_ANOTHER)
    checksum = content.pop(CHECKSUM, None)
    try:
        manifest = CheckpointManifest.model_validate(content)
    except ValidationError as error:
        is_of_another_version = error.errors()[0]["loc"] == ("format",)
        kind = CheckpointError if is_of_another_version else DamagedCheckpointError
        raise kind(
            f"{path}: not a checkpoint's manifest: {first_fault(error)}; {_USE_ANOTHER}"
        ) from None
    # A manifest may come from a stranger: no name in it may lead out of the folder.
    if not all(map(is_plain_name, manifest.files)):
        raise CheckpointError(f"{path}: names files outside its folder; do not use this checkpoint")
    check_checksum(content, checksum, path, DamagedCheckpointError, _USE_ANOTHER)
    return manifest


def check_file(manifest: CheckpointManifest, folder: Path, name: str) -> None:
    """Checks that the file `name` of a checkpoint is, byte for byte, what was written.

    Raises:
        DamagedCheckpointError: it is missing, or differs.
        CheckpointStorageError: this node does not see the checkpoint at all.
    """
    path = folder / name
    record = manifest.files[name]
    try:
        # The size first: it finds a file that was cut short without reading it.
        if path.stat().st_size == record.bytes and file_hash(path) == record.sha256:
            return
    except FileNotFoundError:
        if not (folder / MANIFEST_FILE).exists():
            raise CheckpointStorageError(
                f"{folder}: not visible on {socket.gethostname()}; check the file system there, "
                "then start again"
            ) from None
    raise DamagedCheckpointError(f"{path}: missing, or not what was written; {_USE_ANOTHER}")


def check_same_run(
    manifest: CheckpointManifest,
    folder: Path,
    run: RunRecord,
    names: tuple[str, ...] = SAME_OVER_A_RUN,
) -> None:
    """Checks that a run can resume from a checkpoint.

    Compared are the base, the settings `names`, and with `data` the content of the corpora and the
    stages that have begun. The parallel layout may differ. Settings that did not exist when the
    checkpoint was saved have their defaults; what the checkpoint does not record (`not_recorded`)
    is not compared.

    Raises:
        CheckpointError: one of them differs.
    """
    saved_base = manifest.run.base
    if saved_base.hashes != run.base.hashes:
        raise CheckpointError(
            f"{folder}: its base {saved_base.path} had other weights than the configuration's base "
            "has; point `base` at that model, or start a run in another folder"
        )
    changed = changed_entry(saved_base.architecture, run.base.architecture)
    if changed:
        raise CheckpointError(
            f"{folder}: the config.json of its base {saved_base.path} had another {changed}; put "
            "it back as it was, or start a run in another folder"
        )

    if manifest.run.own_tokens != run.own_tokens:
        raise CheckpointError(
            f"{folder}: was trained with rows of their own for other tokens; put the run's initial "
            "expansion back as it was, or start a run in another folder"
        )
    difference = changed_settings(_compared(manifest.run, names), _compared(run, names))
    if difference is not None:
        raise CheckpointError(
            f"{folder}: was trained with another {difference}; set it back, or name another "
            "`folder` in the configuration, where a new run begins"
        )
    if "data" in names:
        _check_same_corpora(manifest, folder, run)
        _check_same_stages(manifest, folder, run)


def changed_settings(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first setting that two records do not have in common, with both values, and how many
    others; None: there is none."""
    before = dict(flattened(_as_settings(saved)))
    now = dict(flattened(_as_settings(wanted)))
    # Names of either: a setting may exist in one of them only, as those of another method.
    different = [name for name in before | now if before.get(name) != now.get(name)]
    if not different:
        return None
    name = different[0]
    more = ""
    if len(different) > 1:
        more = f" and {len(different) - 1} other settings"
    return (
        f"{_SECTION.get(name, '')}{name} (expected {before.get(name)!r}, found {now.get(name)!r})"
        f"{more}"
    )


def _as_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a record by the names that they have in a configuration."""
    settings = dict(record)
    if "is_hosted" in settings:
        settings["base_code"] = "transformers" if settings.pop("is_hosted") else "native"
    return settings


def check_continues_function(
    expansion: ExpansionFolder, config: RunConfig, spec: DecoderSpec
) -> None:
    """Checks that a run that trains an exported expansion further computes with it what the run
    did that trained it.

    Of an initial expansion, which has learned nothing, these settings may change.

    Raises:
        CheckpointError: a setting differs that changes what trained weights compute.
    """
    recorded = expansion.manifest.trained_as
    if recorded is None:
        return
    saved = {**recorded, "method": with_defaults(Method, recorded["method"])}
    difference = changed_settings(saved, describe_model(config, spec))
    if difference is not None:
        raise CheckpointError(
            f"{expansion.path}: was trained with another {difference}, with which its weights "
            "compute something else; set it back, or remove `init_expansion` to train a new one"
        )


def _check_same_corpora(manifest: CheckpointManifest, folder: Path, run: RunRecord) -> None:
    """Compares the content of the corpora that the checkpoint and the run both read.

    Which corpora there are is a setting, and is compared with the settings.

    Raises:
        CheckpointError: a corpus holds other tokens than when the checkpoint was trained.
    """
    before = manifest.run.corpora or {}
    now = run.corpora or {}
    changed = [name for name in before if name in now and before[name] != now[name]]
    if changed:
        more = ""
        if len(changed) > 1:
            more = f" and {len(changed) - 1} more"
        raise CheckpointError(
            f"{folder}: was trained when the corpus {changed[0]}{more} held other tokens than it "
            "holds now; put that corpus back (make it again of the same files), or name another "
            "`folder` in the configuration, where a new run begins"
        )


def _check_same_stages(manifest: CheckpointManifest, folder: Path, run: RunRecord) -> None:
    """Compares the stages that have begun; the number of steps only of those that have ended.

    Raises:
        CheckpointError: one differs.
    """
    remedy = "set it back, or name another `folder` in the configuration, where a new run begins"
    before = manifest.run.stages
    now = run.stages
    if bool(before) != bool(now):
        found = "in stages" if before else "without stages"
        raise CheckpointError(f"{folder}: was trained {found}; {remedy}")
    step = manifest.position.step
    begun_before = _begun(before, step)
    begun_now = _begun(now, step)
    if len(begun_before) != len(begun_now):
        raise CheckpointError(
            f"{folder}: its step {step} was in stage {len(begun_before)} of the run, and would now "
            f"be in stage {len(begun_now)}: other numbers of steps; {remedy}"
        )
    for saved, wanted in zip(begun_before, begun_now, strict=True):
        for name, value in saved.items():
            if value != wanted[name]:
                raise CheckpointError(
                    f"{folder}: was trained with another stages.{saved['name']}.{name} (expected "
                    f"{value!r}, found {wanted[name]!r}); {remedy}"
                )


def stages_begun(stages: Sequence[StageRecord], step: int) -> list[StageRecord]:
    """The stages that have begun after `step` steps; the first one always has."""
    begun: list[StageRecord] = []
    first_step = 0
    for stage in stages:
        if begun and step <= first_step:
            break
        begun.append(stage)
        first_step += stage.steps
    return begun


def _begun(stages: Sequence[StageRecord], step: int) -> list[dict[str, Any]]:
    """The stages that have begun after `step` steps, the last one without its number of steps."""
    begun = [stage.model_dump() for stage in stages_begun(stages, step)]
    if begun:
        del begun[-1]["steps"]
    return begun


def not_recorded(manifest: CheckpointManifest) -> list[str]:
    """The inputs that a checkpoint of an earlier version does not record.

    Nobody can tell whether they changed.
    """
    missing = []
    if manifest.run.base.architecture is None:
        missing.append("the config.json of its base")
    if manifest.run.corpora is None:
        missing.append("the tokens of its corpora")
    return missing


def _compared(run: RunRecord, names: tuple[str, ...]) -> dict[str, Any]:
    """The settings `names` of a run, without the sources of its corpora."""
    # The schemas fill in the defaults of settings that are not recorded.
    data = with_new_names(run.data)
    corpora = {name: _with_files(corpus) for name, corpus in data["corpora"].items()}
    record = run.model_dump()
    record["data"] = with_defaults(Data, data | {"folder": "-", "corpora": corpora})
    record["method"] = with_defaults(Method, run.method)
    return {name: record[name] for name in names}


def _with_files(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a corpus without its source, and with placeholders for its files.

    The record has no paths, and without any the schema would refuse it.
    """
    settings = {name: value for name, value in corpus.items() if name != "source"}
    sample = corpus.get("sample")
    if sample:
        settings["sample"] = {**sample, "prompts": ["-"]}
    else:
        settings["input"] = ["-"]
    return settings
