"""The stage `gate`: fits the gate of a run's newest checkpoint, measures it on held-out text, and
writes it with its figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline import log
from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.manifest import MANIFEST_FILE, check_file
from pipeline.checkpoint.trained_model import TrainedModel, open_trained
from pipeline.config.gate import GateFeatures, GateSettings, OpenIdSettings
from pipeline.config.run import RunConfig
from pipeline.data.corpus.manifest import MANIFEST
from pipeline.data.dataset.samples import load_heldout
from pipeline.data.tokenize.corpora import has_heldout, heldout_folder, train_folder
from pipeline.data.tokenizer.extension.vocabulary import read_vocabulary
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import CheckpointError, DataError, PreservationError
from pipeline.evaluation.table import cell, readable, table
from pipeline.files.hashes import file_hash
from pipeline.gating.effect import loaded, measure
from pipeline.gating.fit import area_under_roc, fit_logistic, standardisation, threshold_for
from pipeline.gating.folder import (
    FIRST_TOKENS,
    GATE_FOLDER,
    GATE_RECORD,
    GateRecord,
    open_gate,
    write_gate,
)
from pipeline.gating.gate import FittedGate, gate_features
from pipeline.gating.open_ids import NO_OPEN_IDS, OpenIds, choose_open_ids
from pipeline.gating.windows import FittingText, Windows, read_fitting_text
from pipeline.log import progress_bar
from pipeline.methods.own_tokens import token_counts
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.scale.plan import GATE_LAYER, checked_gate_layer

MOST_LEFT_OUT = 0.5
"""The largest share of self-generated text that may look like the new text."""
MOST_COST = 0.02
"""By what share the gate may raise the perplexity of new text without a warning."""
_logger = log.get_logger(__name__)


def fit_gate(config: RunConfig) -> tuple[GateRecord, bool]:
    """Fits the gate that the section `gate` describes for the run's newest checkpoint.

    The gate and its record are written to `<folder>/gate`.

    Returns:
        The record of the gate.
        Whether it was fitted now; False if an earlier call with an equal request had written it.

    Raises:
        ConfigError: gate.layer is not in the base.
        CheckpointError: the checkpoint is missing or damaged, or does not fit.
        BaseModelError: the base is missing or damaged, or does not fit.
        DataError: a corpus is missing, damaged or too small, or does not fit.
        PreservationError: a sequence on which the gate never opens does not get the base's logits.
    """
    assert config.gate is not None, "its caller has seen it"
    model = open_trained(newest_checkpoint(config), config.base)
    folder = config.folder / GATE_FOLDER
    request = _request(config, config.gate, model)
    found = _earlier(folder)
    if found is not None and found.request == request:
        return found, False

    # Before the long work: a damaged checkpoint would give a gate of other weights.
    for name in model.manifest.files:
        check_file(model.manifest, model.checkpoint, name)
    layer = gate_layer(config.gate, model)
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    text = _fitting_text(config, config.gate, fingerprint)
    heldout = load_heldout(config.data, tokenizer_fingerprint=fingerprint)
    if not heldout:
        raise DataError(
            "gate: no corpus has a held-out part to measure it on; set heldout_input or "
            "heldout_fraction"
        )

    decoder = loaded(model)
    base = decoder
    if not decoder.keeps_base:
        # Full fine-tuning: the base is a model of its own.
        base = loaded(replace(model, untrained=True))
    fit = fit_on(BaseStream(base, layer), text, config.gate)
    open_ids = NO_OPEN_IDS
    if config.gate.open_ids is not None:
        open_ids = _open_ids(config, config.gate.open_ids, model, fit.self_generated_ids)
    gate = replace(fit.gate, open_ids=open_ids.ids)
    # On text that was not used for fitting. A token is open by its score, or by its id.
    is_new_open = (fit.new > gate.threshold) | gate.opens_id(fit.new_ids)
    is_negative_open = (fit.negatives > gate.threshold) | gate.opens_id(fit.negative_ids)
    texts, difference = measure(decoder, base, gate, heldout, config)
    if difference not in (0.0, None):
        raise PreservationError(
            f"{folder}: where the gate never opens, logits differ from the base's by up to "
            f"{difference:.3g}, expected 0.0; nothing was written: report it"
        )
    record = GateRecord(
        request=request,
        layer=gate.layer,
        features=gate.features,
        bias=gate.bias,
        threshold=gate.threshold,
        open_ids=len(gate.open_ids),
        open_ids_of_new=open_ids.of_new,
        open_ids_of_old=open_ids.of_old,
        auc=area_under_roc(fit.new, fit.negatives),
        closed_fraction_of_new=float((~is_new_open).double().mean()),
        open_fraction_of_negatives=float(is_negative_open.double().mean()),
        left_out_of_own_text=fit.left_out,
        heldout=texts,
        closed_max_abs_logit_difference=difference,
    )
    write_gate(folder, gate, record)
    warn_of_cost(record)
    return record, True


def _fitting_text(config: RunConfig, settings: GateSettings, fingerprint: str) -> FittingText:
    """The windows to fit on.

    The new tokens of an extended vocabulary are left out: they are open whatever their score.
    """
    if config.vocabulary is None:
        return read_fitting_text(config, settings, fingerprint)
    vocabulary = read_vocabulary(config.vocabulary.folder)
    text = read_fitting_text(config, settings, fingerprint, vocabulary.base_tokenizer)
    return FittingText(
        fit=text.fit.without_tokens_from(vocabulary.base_rows),
        unused=text.unused.without_tokens_from(vocabulary.base_rows),
    )


def _open_ids(
    config: RunConfig, settings: OpenIdSettings, model: TrainedModel, self_generated_ids: Tensor
) -> OpenIds:
    """The ids that the gate opens, chosen by the counts of the corpora of role new and of old text.

    Old text is the self-generated text that was read, and all corpora of role replay.

    self_generated_ids: [Q], as in `Fit`.

    Raises:
        DataError: a corpus is missing, damaged, or not of this tokenizer.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    # The corpora also hold ids of new tokens, which come after the base's. They are counted, and
    # left out below: they are open anyway.
    rows = model.spec.vocab_size
    base_rows = model.base.spec.vocab_size
    new = token_counts(config, "new", rows, tokenizer_fingerprint=tokenizer.fingerprint)
    old = token_counts(config, "replay", rows, tokenizer_fingerprint=tokenizer.fingerprint)
    old += np.bincount(self_generated_ids.numpy(), minlength=rows)
    return choose_open_ids(
        new[:base_rows],
        old[:base_rows],
        min_count=settings.min_count,
        never=tokenizer.reference.added_ids,
    )


def _earlier(folder: Path) -> GateRecord | None:
    """The record of the gate in `folder`; None if there is none, or if it must be fitted again."""
    if not (folder / GATE_RECORD).exists():
        return None
    try:
        return open_gate(folder)[1]
    except CheckpointError as fault:
        _logger.warning("fits the gate again: %s", fault)
        return None


def warn_of_cost(record: GateRecord) -> None:
    """Warns where the gate raises the perplexity of new text by more than MOST_COST."""
    for name, text in record.heldout.items():
        if text.role == "new" and text.cost > MOST_COST:
            _logger.warning(
                "%s: its perplexity is %.1f %% higher with the gate than without: the first %d "
                "tokens cost %.2f nats each, later ones %.4f",
                name,
                100 * text.cost,
                FIRST_TOKENS,
                text.cost_of_first_tokens or 0.0,
                text.cost_of_later_tokens or 0.0,
            )
        if text.impossible_fraction > MOST_COST:
            _logger.warning(
                "%s: %.1f %% of its tokens are new tokens after a closed token: the gated model "
                "cannot write them",
                name,
                100 * text.impossible_fraction,
            )


class BaseStream:
    """The base's stream before layer `layer` of a decoder.

    No trained weights may change it there: the decoder is the base itself, or a model whose trained
    weights begin further up or are left out of the base's path.
    """

    def __init__(self, decoder: CausalDecoder, layer: int) -> None:
        self.device = decoder.device
        self.layer = layer
        self.decoder = decoder

    def features(self, windows: Windows, kind: GateFeatures) -> tuple[Tensor, Tensor]:
        """The features of the T tokens that are present, in order.

        Returns:
            features: [T, F], in fp32 on the CPU.
            is_new: bool [T].
        """
        found: list[Tensor] = []
        for group, stream in self._streams(windows, "reading the base's states"):
            features = gate_features(stream, kind, group.document_ids.to(self.device))
            found.append(features[group.present.to(self.device)].cpu())
        return torch.cat(found), windows.is_new[windows.present]

    def scores(self, windows: Windows, gate: FittedGate) -> Tensor:
        """The gate's scores: [N, S], on the CPU."""
        found: list[Tensor] = []
        for group, stream in self._streams(windows, "testing the gate"):
            found.append(gate.scores(stream, group.document_ids.to(self.device)).cpu())
        return torch.cat(found)

    def _streams(self, windows: Windows, what: str) -> Iterator[tuple[Windows, Tensor]]:
        """Groups of windows, each with its stream: [N, S, D]."""
        with progress_bar(what, windows.tokens.numel(), " tokens") as bar:
            for group in windows.groups():
                stream = self.decoder.base_stream(
                    group.tokens.to(self.device),
                    group.positions.to(self.device),
                    group.documents(self.device),
                    layer=self.layer,
                )
                yield group, stream
                bar.update(group.tokens.numel())


class Fit(NamedTuple):
    """A fitted gate, and how it scores text that it was not fitted on.

    Attributes:
        gate: with its threshold.
        new: [P], the scores of unused tokens of new text.
        negatives: [M], the scores of unused tokens of other text.
        left_out: the share of the self-generated text whose documents look like the new text. It
            counts neither as new nor as other text.
        new_ids: [P], the ids of the tokens whose scores are `new`.
        negative_ids: [M], the ids of the tokens whose scores are `negatives`.
        self_generated_ids: [Q], the ids of all self-generated tokens that were read, without tokens
            that look new.
    """

    gate: FittedGate
    new: Tensor
    negatives: Tensor
    left_out: float
    new_ids: Tensor
    negative_ids: Tensor
    self_generated_ids: Tensor


def fit_on(stream: BaseStream, text: FittingText, settings: GateSettings) -> Fit:
    """A gate that reads `stream`, fitted on `text.fit`, with a threshold from `text.unused`.

    A base that knows a little of the new language may write in it. So the gate is fitted twice: the
    first fit finds self-generated documents that look like the new text, and the second leaves them
    out.

    Raises:
        DataError: the text is too little, or most of the self-generated text looks like the new
            text.
    """
    features, is_new = stream.features(text.fit, settings.features)
    mean, std = standardisation(features)
    # In place: the features are the largest tensor here.
    features = features.sub_(mean).div_(std).to(stream.device)
    weight, bias = fit_logistic(features, is_new.to(stream.device))

    is_open = torch.zeros_like(text.fit.present)
    is_open[text.fit.present] = (features @ weight.to(features) + bias > 0).cpu()
    fit = text.fit.without_new_kind(is_open)
    # Of the rows of `features`, which are the tokens that were present before.
    kept = fit.present[text.fit.present]
    if not kept.all():
        weight, bias = fit_logistic(
            features[kept.to(stream.device)], is_new[kept].to(stream.device)
        )
    del features
    gate = FittedGate(stream.layer, settings.features, mean, std, weight, bias, threshold=0.0)

    scores = stream.scores(text.unused, gate)
    unused = text.unused.without_new_kind(scores > 0)
    before = int((text.unused.present & text.unused.is_self_generated).sum())
    after = int((unused.present & unused.is_self_generated).sum())
    left_out = 0.0
    if before > 0:
        left_out = 1 - after / before
    if left_out > MOST_LEFT_OUT:
        raise DataError(
            f"gate: {left_out:.0%} of the self-generated text looks like the new text, expected at "
            f"most {MOST_LEFT_OUT:.0%}; name corpora of role replay as gate.negatives, or "
            "remove the section gate"
        )
    new = scores[unused.present & unused.is_new]
    negatives = scores[unused.present & ~unused.is_new]
    threshold = threshold_for(negatives, settings.max_open_fraction)
    return Fit(
        gate=replace(gate, threshold=threshold),
        new=new,
        negatives=negatives,
        left_out=left_out,
        new_ids=unused.tokens[unused.present & unused.is_new],
        negative_ids=unused.tokens[unused.present & ~unused.is_new],
        self_generated_ids=torch.cat(
            [fit.self_generated_ids(is_open), unused.self_generated_ids(scores > 0)]
        ),
    )


def _request(config: RunConfig, settings: GateSettings, model: TrainedModel) -> dict[str, Any]:
    """What a gate depends on. A gate that was fitted for an equal request is not fitted again."""
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
    return {
        "checkpoint_manifest": file_hash(model.checkpoint / MANIFEST_FILE),
        "settings": settings.model_dump(mode="json"),
        "seed": config.seed,
        "max_sequences": config.validation.max_sequences,
        "sequence_length": config.data.sequence_length,
        "corpora": corpora,
    }


def gate_layer(settings: GateSettings, model: TrainedModel) -> int:
    """The layer before which the gate of `model` reads the base's stream.

    Raises:
        ConfigError: the base has fewer layers than gate.layer.
    """
    plan = model.plan
    if plan is None:
        # Full fine-tuning: the base runs beside the trained model, exact in every layer.
        return checked_gate_layer(settings.layer, GATE_LAYER, model.spec.num_layers)
    layer = plan.gate_layer(settings.layer)
    if layer > plan.last_exact_layer:
        _logger.info(
            "gate.layer %d is above layer %d, where trained weights begin: the %d layers between "
            "run twice, once with the base's weights alone",
            layer,
            plan.last_exact_layer,
            layer - plan.last_exact_layer,
        )
    return layer


def as_text(record: GateRecord) -> str:
    """A table of the held-out corpora, and how well the gate separates unused text."""
    header = ["held-out corpus", "open", "perplexity: base", "ungated", "gated"]
    header += [f"nats lost: first {FIRST_TOKENS}", "later"]
    rows = []
    for name, text in record.heldout.items():
        row = [f"{name} ({text.role})", f"{text.open_fraction:.2%}"]
        for value in (text.base_perplexity, text.ungated_perplexity, text.gated_perplexity):
            row.append("" if value is None else readable(value))
        row.append(cell(text.cost_of_first_tokens, "+.3f"))
        row.append(cell(text.cost_of_later_tokens, "+.4f"))
        rows.append(row)
    impossible = max(text.impossible_fraction for text in record.heldout.values())
    facts = (
        f"the gate reads {record.features} before layer {record.layer}; on text not used for "
        f"fitting, without an extended vocabulary's new tokens, which are open: AUC "
        f"{record.auc:.5f}, {record.closed_fraction_of_new:.2%} of the tokens of new text closed, "
        f"{record.open_fraction_of_negatives:.2%} of other tokens open; "
        f"{record.left_out_of_own_text:.2%} of the self-generated text left out; "
        f"{record.open_ids} ids are open, {record.open_ids_of_new:.2%} of the tokens of new text; "
        f"at most {impossible:.2%} of a corpus's tokens are impossible: new tokens after a closed "
        "token"
    )
    return f"{table(header, rows)}\n\n{facts}"
