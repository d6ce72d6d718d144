"""A fitted gate on disk: its tensors in gate.safetensors; its numbers, and figures of how well it
separates texts, in gate.json.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load, save_file

from pipeline.config.gate import GateFeatures, ThresholdRule
from pipeline.errors import CheckpointError
from pipeline.files.folders import FolderKind, published_folder
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_record, write_record
from pipeline.files.reading import read_bytes
from pipeline.gating.gate import FittedGate
from pipeline.run_folder.status import unfinished_progress

GATE_FOLDER = "gate"
"""Where a run's gate is, in the run's folder."""
GATE_RECORD = "gate.json"
FORMAT = "scale-cpt gate 1"
GATE = FolderKind("a gate", GATE_RECORD, FORMAT)
_TENSOR_FILE = "gate.safetensors"
_OPEN_IDS = "open_ids"
_AGAIN = "fit the gate again with scale-cpt gate"
FIRST_TOKENS = 4
"""How many tokens count as the first ones of a document, or of a sample that continues one. A gate
has read too little there to tell the kind of the text, so their cost is measured apart.
"""


class HeldoutText(BaseModel):
    """What the gate does to the held-out part of a corpus.

    Perplexities are None if nothing is predicted in that part. The base's is also None if the part
    holds tokens that the base does not have.
    """

    model_config = ConfigDict(frozen=True)

    role: str
    sequences: int
    tokens: int
    open_fraction: float
    closed_sequences: int
    """number of sequences of which every token is closed"""
    impossible_fraction: float = 0.0
    """share of the predicted tokens that are new tokens after a closed token: their probability is
    zero, and no perplexity counts them
    """
    cost_of_first_tokens: float | None = None
    """nats a token by which the gate raises the loss on the first FIRST_TOKENS tokens; None: not
    measured
    """
    cost_of_later_tokens: float | None = None
    """nats a token by which the gate raises the loss on all other tokens; None: not measured"""
    base_perplexity: float | None
    ungated_perplexity: float | None
    gated_perplexity: float | None

    @property
    def cost(self) -> float:
        """By what share the gate raises the perplexity: 0.02 is 2 % more."""
        # A perplexity that overflows is stored as None. With the gate alone it is infinite growth.
        gated = self.gated_perplexity or math.inf
        ungated = self.ungated_perplexity or math.inf
        return gated / ungated - 1


class ThresholdFigures(BaseModel):
    """A threshold, and what a gate with it does to text that was not used for fitting, by its
    tokens alone."""

    model_config = ConfigDict(frozen=True)

    threshold: float
    cost: float
    """by what share closed tokens raise the perplexity of held-out new text, behind the first
    FIRST_TOKENS tokens of its documents"""
    closed_fraction_of_new: float
    open_fraction_of_negatives: float


class KindFigures(BaseModel):
    """What the gate does to one kind of text that was not used for fitting."""

    model_config = ConfigDict(frozen=True)

    tokens: int
    open_tokens: int
    cost: float | None = None
    """nats a token by which the gate raises the loss: over the base's for other text, over the
    ungated model's for new text; None: not measured"""
    left_out: bool = False
    """whether it looks like the new text, or is named in gate.leave_out: it was not fitted on"""
    is_new: bool = False
    """whether the gate is to be open: new text that follows other text"""

    @property
    def open_fraction(self) -> float:
        return self.open_tokens / max(1, self.tokens)


class GateRecord(BaseModel):
    """The contents of gate.json. Files of earlier versions have more entries; they are not read."""

    model_config = ConfigDict(frozen=True)

    format: Literal["scale-cpt gate 1"] = "scale-cpt gate 1"
    request: dict[str, Any]
    """what the gate was fitted for: the settings, and the checkpoint and corpora by their hashes"""
    layer: int
    features: GateFeatures
    bias: float
    threshold: float
    """score above which a token is open; a score is the log odds that the text is new"""
    lower: None = None
    """second threshold of gates of earlier versions, which are refused and fitted again: always
    null
    """
    open_ids: int = 0
    """number of ids that are open whatever their score; gate.safetensors holds the ids"""
    open_ids_of_new: float = 0.0
    """their share of the tokens of the corpora of role new"""
    open_ids_of_old: float = 0.0
    """their share of the tokens of the old text that was read"""
    auc: float
    """share of the pairs of a new token and another token that the score orders correctly; as all
    figures below, on text that no weight was fitted on. The threshold was chosen on it, and
    self-generated documents that look new are not part of it (left_out_of_own_text)"""
    closed_fraction_of_new: float
    """share of the tokens of new text on which the gate is closed"""
    open_fraction_of_negatives: float
    """share of the tokens of other text on which the gate is open"""
    left_out_of_own_text: float
    """share of the self-generated text, in tokens, whose documents look like the new text; they
    were left out of fitting
    """
    heldout: dict[str, HeldoutText]
    threshold_rule: ThresholdRule = "max_open_fraction"
    """which rule of `thresholds` chose the threshold"""
    thresholds: dict[str, ThresholdFigures] = {}
    """by rule: the threshold that it gives, and its figures; gates of earlier versions have none"""
    kinds: dict[str, KindFigures] = {}
    """by kind of text in gate.negatives_file"""
    changes: dict[str, KindFigures] = {}
    """of text that changes between new and other text within a document"""
    closed_max_abs_logit_difference: float | None
    """largest difference of a logit from the base's, in held-out sequences on which the gate
    never opens; None if there is no such sequence, and for full fine-tuning, whose export is
    compared instead
    """
    tensors_hash: str = ""
    """SHA-256 of gate.safetensors"""


def write_gate(folder: Path, gate: FittedGate, record: GateRecord) -> None:
    """Writes a gate to `folder`, completely or not at all; replaces an earlier one.

    Raises:
        OutputError: `folder` is something else.
    """
    with published_folder(folder, GATE) as partial:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in gate.tensors.items():
            # safetensors stores contiguous tensors only.
            tensors[name] = tensor.cpu().contiguous()
        tensors[_OPEN_IDS] = torch.tensor(gate.open_ids, dtype=torch.long)
        save_file(tensors, partial / _TENSOR_FILE)
        stored = record.model_copy(update={"tensors_hash": file_hash(partial / _TENSOR_FILE)})
        write_record(partial / GATE_RECORD, stored)


def open_record(folder: Path) -> GateRecord:
    """The gate.json of the gate in `folder`.

    Raises:
        CheckpointError: it is missing, damaged, changed by hand, or not one of this version.
    """
    path = folder / GATE_RECORD
    try:
        # An export takes the threshold from this file: a checksum shows whether it was changed.
        return read_record(path, GateRecord, CheckpointError, _AGAIN, needs_checksum=True)
    except FileNotFoundError:
        progress = unfinished_progress(folder.parent)
        if progress is not None:
            raise CheckpointError(
                f"{path}: no such file; the run is at {progress}, and the gate is fitted after "
                "training: finish it, or run the stage gate (scale-cpt gate) for this step"
            ) from None
        raise CheckpointError(
            f"{path}: no such file; the gate is not fitted yet: run the stage gate (scale-cpt "
            "gate) first"
        ) from None


def open_gate(folder: Path) -> tuple[FittedGate, GateRecord]:
    """The gate that `write_gate` wrote to `folder`, and its record.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    record = open_record(folder)
    path = folder / _TENSOR_FILE
    try:
        content = read_bytes(path, CheckpointError, _AGAIN)
    except FileNotFoundError:
        # Its hash is none that a record has, so that a missing file is reported below.
        content = b""
    if hashlib.sha256(content).hexdigest() != record.tensors_hash:
        raise CheckpointError(
            f"{path}: damaged or missing (another SHA-256 than in {GATE_RECORD}); {_AGAIN}"
        )
    tensors = load(content)
    # Gates of earlier versions have none.
    open_ids = tensors.pop(_OPEN_IDS, torch.empty(0, dtype=torch.long))
    gate = FittedGate(
        layer=record.layer,
        features=record.features,
        mean=tensors["mean"].float(),
        std=tensors["std"].float(),
        weight=tensors["weight"].float(),
        bias=record.bias,
        threshold=record.threshold,
        open_ids=tuple(open_ids.tolist()),
    )
    return gate, record
