"""Fits the gate of a run's newest checkpoint, measures it on held-out text, and publishes both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipeline import log
from pipeline.checkpoint.manifest import MANIFEST_FILE, check_file
from pipeline.config.run import GateSettings, RunConfig
from pipeline.conversion.convert import newest_checkpoint
from pipeline.conversion.trained_model import TrainedModel, open_trained
from pipeline.data.corpora import has_heldout, heldout_folder, train_folder
from pipeline.data.samples import load_heldout
from pipeline.data.token_corpus import MANIFEST
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import CheckpointError, ConfigError, DataError, PreservationError
from pipeline.files import file_hash
from pipeline.gating.effect import measure
from pipeline.gating.fit import (
    area_under_roc,
    calibration_bins,
    fit_logistic,
    roc_points,
    standardisation,
    threshold_for,
)
from pipeline.gating.states import BaseStream
from pipeline.gating.windows import FittingText, read_fitting_text
from pipeline.scale.gate import Gate, deepest_gate_layer
from pipeline.scale.gate_folder import GATE_FOLDER, GateRecord, open_gate, write_gate

_logger = log.get_logger(__name__)


def fit_gate(config: RunConfig) -> tuple[GateRecord, bool]:
    """Fits the gate that the section `gate` describes for the run's newest checkpoint, into `<folder>/gate`.

    Returns its record, and whether it was fitted now; False if an equal request has already made it.

    Raises:
        ConfigError: gate.layer is not in the base.
        CheckpointError, BaseModelError, DataError: what is read is missing, damaged, too small or does not fit.
        PreservationError: a sequence on which the gate never opens does not get the base's logits.
    """
    if config.gate is None:
        raise ValueError("the configuration has no section gate")
    model = open_trained(newest_checkpoint(config), config.base)
    request = request_of(config, model)
    folder = config.folder / GATE_FOLDER
    if (found := _fitted(config, request)) is not None:
        return found, False
    for name in model.manifest.files:
        check_file(model.manifest, model.checkpoint, name)
    layer = gate_layer(config.gate, model)
    fingerprint = load_tokenizer(config.base).fingerprint
    text = read_fitting_text(config, fingerprint)
    heldout = load_heldout(config.data, tokenizer_fingerprint=fingerprint)
    if not heldout:
        raise DataError("gate: no corpus has a held-out part to measure it on; set heldout_input or heldout_fraction")

    gate, new, negatives = fit_on(BaseStream(model, layer), text, config.gate)
    effect = measure(replace(model, gate=gate), heldout, config)
    if effect.closed_max_abs_logit_difference not in (0.0, None):
        raise PreservationError(
            f"{folder}: where the gate never opens, logits differ from the base's by up to "
            f"{effect.closed_max_abs_logit_difference:.3g}, expected 0.0; nothing was written: report it"
        )
    record = GateRecord(
        request=request,
        layer=layer,
        features=gate.features,
        bias=gate.bias,
        threshold=gate.threshold,
        auc=area_under_roc(new, negatives),
        closed_fraction_of_new=float((new <= gate.threshold).double().mean()),
        open_fraction_of_negatives=float((negatives > gate.threshold).double().mean()),
        roc=roc_points(new, negatives),
        calibration=calibration_bins(new, negatives),
        heldout=dict(effect.heldout),
        closed_max_abs_logit_difference=effect.closed_max_abs_logit_difference,
    )
    write_gate(folder, gate, record)
    return record, True


def fit_on(stream: BaseStream, text: FittingText, settings: GateSettings) -> tuple[Gate, Tensor, Tensor]:
    """A gate of that stream, and its scores of the unused tokens: those of new text, and the others.

    Raises:
        DataError: the text is too little.
    """
    features, is_new = stream.features(text.fit, settings.features)
    mean, std = standardisation(features)
    features = features.sub_(mean).div_(std).to(stream.device)
    weight, bias = fit_logistic(features, is_new.to(stream.device))
    del features
    gate = Gate(stream.layer, settings.features, mean, std, weight, bias, threshold=0.0)
    new, negatives = stream.scores(text.unused, gate)
    return replace(gate, threshold=threshold_for(negatives, settings.max_open_fraction)), new, negatives


def request_of(config: RunConfig, model: TrainedModel) -> dict[str, Any]:
    """What a gate depends on: the checkpoint, the settings, the seed, and the corpora that it reads."""
    if config.gate is None:
        raise ValueError("the configuration has no section gate")
    read = [train_folder(config.data, name) for name in config.data.corpora]
    read += [heldout_folder(config.data, name) for name in config.data.corpora if has_heldout(config.data, name)]
    manifests = {path.name: path / MANIFEST for path in read}
    request = {
        "checkpoint_manifest": file_hash(model.checkpoint / MANIFEST_FILE),
        "settings": config.gate.model_dump(mode="json"),
        "seed": config.seed,
        "max_sequences": config.validation.max_sequences,
        "sequence_length": config.data.sequence_length,
        "corpora": {name: file_hash(path) for name, path in manifests.items() if path.exists()},
    }
    return dict(json.loads(json.dumps(request)))


def _fitted(config: RunConfig, request: dict[str, Any]) -> GateRecord | None:
    """The record of the run's gate, if that was fitted for an equal request and is whole."""
    try:
        _, record = open_gate(config.folder / GATE_FOLDER)
    except CheckpointError:
        return None
    return record if record.request == request else None


def gate_layer(settings: GateSettings, model: TrainedModel) -> int:
    """The layer before which the gate of `model` reads the base's stream.

    Raises:
        CheckpointError: the model is not widened.
        ConfigError: the model does not have the base's stream there.
    """
    if model.plan is None:
        raise CheckpointError(
            f"{model.checkpoint}: method {model.settings.name} adds nothing that a gate could close; remove the "
            "section gate"
        )
    deepest = deepest_gate_layer(model.plan)
    if settings.layer is not None and settings.layer > deepest:
        raise ConfigError(
            f"gate.layer: {settings.layer} is beyond {deepest}, the last place where this model has the exact stream "
            f"of its base; use 0 to {deepest}"
        )
    return deepest if settings.layer is None else settings.layer
