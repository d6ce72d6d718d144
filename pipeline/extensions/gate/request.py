"""What a gate is fitted for: a gate that was fitted for the same is not fitted again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.checkpoint.manifest import MANIFEST_FILE
from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.gate import GateSettings
from pipeline.config.run import RunConfig
from pipeline.data.corpus.manifest import MANIFEST
from pipeline.data.tokenize.corpora import has_heldout, heldout_folder, train_folder
from pipeline.errors import CheckpointError
from pipeline.extensions.gate.kinds import negatives_file
from pipeline.files.hashes import file_hash
from pipeline.gating.folder import GATE_RECORD, GateRecord, open_gate

_SINCE_COSTS = (
    "negatives_file",
    "leave_out",
    "threshold_rule",
    "max_cost",
    "max_closed_fraction",
)
"""Settings that gates of earlier versions were fitted without."""
_logger = log.get_logger(__name__)


def gate_request(config: RunConfig, settings: GateSettings, model: TrainedModel) -> dict[str, Any]:
    """What a gate depends on.

    Raises:
        DataError: gate.negatives_file is missing.
    """
    folders: list[Path] = []
    for name in config.data.corpora:
        folders.append(train_folder(config.data, name))
        if has_heldout(config.data, name):
            folders.append(heldout_folder(config.data, name))
    corpora: dict[str, str] = {}
    for folder in folders:
        # A corpus that is missing is named by the error of whoever reads it.
        if (folder / MANIFEST).exists():
            corpora[folder.name] = file_hash(folder / MANIFEST)
    of_settings = settings.model_dump(mode="json")
    file = negatives_file(settings)
    if file is not None:
        # By its content: the file may be moved, and the shipped one is another in each release.
        of_settings["negatives_file"] = file_hash(file)
    return {
        "checkpoint_manifest": file_hash(model.checkpoint / MANIFEST_FILE),
        "settings": of_settings,
        "seed": config.seed,
        "max_sequences": config.validation.max_sequences,
        "sequence_length": config.data.sequence_length,
        "corpora": corpora,
    }


def earlier_gate(folder: Path, request: dict[str, Any]) -> GateRecord | None:
    """The record of the gate in `folder`, if it was fitted for this request; None without one.

    A gate of an earlier version stays as it is: what new settings would change is said.
    """
    if not (folder / GATE_RECORD).exists():
        return None
    try:
        record = open_gate(folder)[1]
    except CheckpointError as fault:
        _logger.warning("fits the gate again: %s", fault)
        return None
    if record.request == request:
        return record
    if record.thresholds or _without_new_settings(request) != record.request:
        return None
    _logger.info(
        "%s: fitted by an earlier version, with the threshold by max_open_fraction and without "
        "negatives_file; it stays as it is: remove the folder to fit it by this version",
        folder,
    )
    return record


def _without_new_settings(request: dict[str, Any]) -> dict[str, Any]:
    """The request as an earlier version made it."""
    settings = dict(request["settings"])
    for name in _SINCE_COSTS:
        settings.pop(name)
    return request | {"settings": settings}
