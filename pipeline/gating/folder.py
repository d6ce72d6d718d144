"""A fitted gate on disk: gate.safetensors holds its tensors, gate.json everything else and how well
it does.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load, save_file

from pipeline.config.gate import GateFeatures
from pipeline.errors import CheckpointError
from pipeline.files.folders import FolderKind, published_folder
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_record, write_record
from pipeline.files.reading import read_bytes
from pipeline.gating.gate import NUMBERS, FittedGate

GATE_FOLDER = "gate"
"""Where a run's gate is, in the run's folder."""
GATE_RECORD = "gate.json"
FORMAT = "scale-cpt gate 1"
GATE = FolderKind("a gate", GATE_RECORD, FORMAT)
_TENSOR_FILE = "gate.safetensors"
_OPEN_IDS = "open_ids"
_AGAIN = "fit the gate again with scale-cpt gate"


FIRST_TOKENS = 4
"""Of a document, or of a sample that continues one: a gate can hardly tell there what the text is.
"""


class HeldoutText(BaseModel):
    """What the gate does to the held-out part of a corpus.

    Perplexities are None if that part predicts nothing, the base's also if it holds tokens that the
    base does not have.
    """

    model_config = ConfigDict(frozen=True)

    role: str
    sequences: int
    tokens: int
    open_fraction: float
    closed_sequences: int
    """on which every token is closed"""
    impossible_fraction: float = 0.0
    """of the predicted tokens: new tokens after a closed token, whose probability is zero; no
    perplexity counts them
    """
    cost_of_first_tokens: float | None = None
    """nats a token by which the gate raises the loss on the first FIRST_TOKENS tokens; None: not
    measured
    """
    cost_of_later_tokens: float | None = None
    base_perplexity: float | None
    ungated_perplexity: float | None
    gated_perplexity: float | None

    @property
    def cost(self) -> float:
        """The factor by which the gate raises the perplexity, less 1."""
        return (self.gated_perplexity or math.inf) / (self.ungated_perplexity or math.inf) - 1


class GateRecord(BaseModel):
    """The contents of gate.json. Those of earlier versions hold more, which nothing reads."""

    model_config = ConfigDict(frozen=True)

    format: Literal["scale-cpt gate 1"] = "scale-cpt gate 1"
    request: dict[str, Any]
    """what the gate was fitted for: the settings, and the checkpoint and corpora by their hashes"""
    layer: int
    features: GateFeatures
    bias: float
    threshold: float
    """of the score, the log odds of new text; the score of an open token is above it"""
    lower: None = None
    """of gates of earlier versions, which had a mean between two thresholds: they are fitted again
    """
    open_ids: int = 0
    """how many ids are open whatever their score; which ones, the file of tensors says"""
    open_ids_of_new: float = 0.0
    """their share of the tokens of the corpora of role new"""
    open_ids_of_old: float = 0.0
    """their share of the tokens of the old text that was read"""
    auc: float
    """on text not used for fitting, as all that follows: the share of the pairs of a new token and
    another that the score orders correctly"""
    closed_fraction_of_new: float
    open_fraction_of_negatives: float
    left_out_of_own_text: float
    """the share of the base's own text that is of the new text's kind, by documents; it counts as
    no negative
    """
    heldout: dict[str, HeldoutText]
    closed_max_abs_logit_difference: float | None
    """from the base, over held-out sequences on which the gate never opens; None if there is none,
    and for full fine-tuning, whose export is compared instead
    """
    tensors_hash: str = ""
    """SHA-256 of gate.safetensors"""


def write_gate(folder: Path, gate: FittedGate, record: GateRecord) -> None:
    """Writes a gate to `folder`, completely or not at all; replaces an earlier one.

    Raises OutputError if `folder` is something else.
    """
    with published_folder(folder, GATE) as partial:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in gate.tensors.items()}
        tensors[_OPEN_IDS] = torch.tensor(gate.open_ids, dtype=torch.long)
        save_file(tensors, partial / _TENSOR_FILE)
        stored = record.model_copy(update={"tensors_hash": file_hash(partial / _TENSOR_FILE)})
        write_record(partial / GATE_RECORD, stored)


def open_record(folder: Path) -> GateRecord:
    """The gate.json of the gate in `folder`.

    Raises CheckpointError if it is missing, damaged, changed by hand, or not one of this version.
    """
    path = folder / GATE_RECORD
    try:
        # Its figures are what an export is trusted by: one without a checksum might hold any
        # threshold.
        return read_record(path, GateRecord, CheckpointError, _AGAIN, needs_checksum=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; the gate is not fitted yet: run the stage gate (scale-cpt "
            "gate) first"
        ) from None


def open_gate(folder: Path) -> tuple[FittedGate, GateRecord]:
    """The gate that `write_gate` wrote to `folder`, and its record.

    Raises CheckpointError if it is missing or damaged.
    """
    record, path = open_record(folder), folder / _TENSOR_FILE
    try:
        content = read_bytes(path, CheckpointError, _AGAIN)
    except FileNotFoundError:
        content = b""
    if hashlib.sha256(content).hexdigest() != record.tensors_hash:
        raise CheckpointError(
            f"{path}: damaged or missing (another SHA-256 than in {GATE_RECORD}); {_AGAIN}"
        )
    tensors = load(content)
    # Gates of earlier versions have none.
    open_ids = tensors.pop(_OPEN_IDS, torch.empty(0, dtype=torch.long))
    of_scores = {name: tensor.float() for name, tensor in tensors.items()}
    numbers = record.model_dump(include=set(NUMBERS))
    return FittedGate(**numbers, **of_scores, open_ids=tuple(open_ids.tolist())), record
