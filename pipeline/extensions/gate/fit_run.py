"""The stage `gate`: fits the gate of a run's newest checkpoint, measures it on held-out text, and
writes it with its figures.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from pipeline import log
from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.manifest import check_file
from pipeline.checkpoint.trained_model import TrainedModel, open_trained
from pipeline.config.gate import GateSettings, OpenIdSettings
from pipeline.config.run import RunConfig
from pipeline.data.dataset.samples import load_heldout
from pipeline.data.tokenize.token_counts import token_counts
from pipeline.data.tokenizer.chats import ChatTemplate, chat_template
from pipeline.data.tokenizer.extension.vocabulary import read_vocabulary
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import DataError, PreservationError
from pipeline.extensions.gate.base_spelling import with_base_spelling
from pipeline.extensions.gate.changes import CHANGES, change_windows
from pipeline.extensions.gate.documents import Packer, document_texts
from pipeline.extensions.gate.effect import measure
from pipeline.extensions.gate.fit import area_under_roc
from pipeline.extensions.gate.fitting import BaseStream, Fit, fit_on
from pipeline.extensions.gate.fitting_text import FittingText, read_fitting_text
from pipeline.extensions.gate.inputs import loaded
from pipeline.extensions.gate.kind_effect import kind_figures
from pipeline.extensions.gate.kinds import kept_records, negatives_file, read_kinds, with_kinds
from pipeline.extensions.gate.new_text import Models, choose_threshold, score_new_text
from pipeline.extensions.gate.open_ids import NO_OPEN_IDS, OpenIds, choose_open_ids
from pipeline.extensions.gate.request import earlier_gate, gate_request
from pipeline.extensions.gate.table import warn
from pipeline.extensions.gate.windows import NO_KIND, Windows, as_windows
from pipeline.gating.folder import GATE_FOLDER, GateRecord, KindFigures, write_gate
from pipeline.gating.gate import FittedGate
from pipeline.scale.plan import GATE_LAYER, checked_gate_layer

_logger = log.get_logger(__name__)


def fit_gate(config: RunConfig) -> tuple[GateRecord, bool]:
    """Fits the gate that the section `gate` describes for the run's newest checkpoint.

    The gate and its record are written to `<folder>/gate`.

    Returns:
        The record of the gate.
        Whether it was fitted now; False if an earlier call with an equal request had written it.

    Raises:
        ConfigError: gate.layer is not in the base, or gate.leave_out names no kind of text.
        CheckpointError: the checkpoint is missing or damaged, or does not fit.
        BaseModelError: the base is missing or damaged, or does not fit.
        DataError: a corpus or gate.negatives_file is missing, damaged or too small, or does not
            fit.
        PreservationError: a sequence on which the gate never opens does not get the base's logits.
    """
    settings = config.gate
    assert settings is not None, "its caller has seen it"
    model = open_trained(newest_checkpoint(config), config.base)
    folder = config.folder / GATE_FOLDER
    request = gate_request(config, settings, model)
    found = earlier_gate(folder, request)
    if found is not None:
        return found, False

    # Before the long work: a damaged checkpoint would give a gate of other weights.
    for name in model.manifest.files:
        check_file(model.manifest, model.checkpoint, name)
    layer = gate_layer(settings, model)
    tokenizer = load_tokenizer(config.tokenizer)
    text = _fitting_text(config, settings, tokenizer)
    heldout = _heldout_windows(config, tokenizer)

    decoder = loaded(model)
    base = decoder
    if not decoder.keeps_base:
        # Full fine-tuning: the base is a model of its own.
        base = loaded(replace(model, untrained=True))
    models = Models(trained=decoder, base=base)
    stream = BaseStream(base, layer)
    fit = fit_on(stream, text, settings.features)
    open_ids = NO_OPEN_IDS
    if settings.open_ids is not None:
        open_ids = _open_ids(config, settings.open_ids, model, fit)
    gate = replace(fit.gate, open_ids=open_ids.ids)
    start_score = fit.start_score(tokenizer.before_document[-1])
    new = score_new_text(models, stream, gate, _new_text(config, heldout, fit), config, start_score)
    thresholds = choose_threshold(models, gate, fit, new, settings, config)
    gate = thresholds.gate

    texts = dict(thresholds.texts)
    rest = {name: windows for name, windows in heldout.items() if name not in texts}
    others, difference = measure(*models, gate, rest, config, new.nll)
    texts |= others
    if thresholds.difference is not None:
        difference = max(thresholds.difference, difference or 0.0)
    if difference not in (0.0, None):
        raise PreservationError(
            f"{folder}: where the gate never opens, logits differ from the base's by up to "
            f"{difference:.3g}, expected 0.0; nothing was written: report it"
        )
    chosen = thresholds.figures[settings.threshold_rule]
    record = GateRecord(
        request=request,
        layer=gate.layer,
        features=gate.features,
        bias=gate.bias,
        threshold=gate.threshold,
        threshold_rule=settings.threshold_rule,
        thresholds=thresholds.figures,
        open_ids=len(gate.open_ids),
        open_ids_of_new=open_ids.of_new,
        open_ids_of_old=open_ids.of_old,
        auc=area_under_roc(fit.new, fit.negatives),
        closed_fraction_of_new=chosen.closed_fraction_of_new,
        open_fraction_of_negatives=chosen.open_fraction_of_negatives,
        left_out_of_own_text=fit.left_out,
        heldout={name: texts[name] for name in heldout},
        kinds=kind_figures(
            models, gate, text.unused, fit.is_open(gate), text.kinds, config, fit.left_out_kinds
        ),
        changes=_changes(models, stream, gate, text, config, tokenizer),
        closed_max_abs_logit_difference=difference,
    )
    write_gate(folder, gate, record)
    warn(record, settings)
    return record, True


def _fitting_text(config: RunConfig, settings: GateSettings, tokenizer: Tokenizer) -> FittingText:
    """The windows to fit on: of the run's corpora, and of the kinds of text in a file.

    The new tokens of an extended vocabulary are left out: they are open whatever their score.

    Raises:
        ConfigError: gate.leave_out names no kind.
        DataError: a corpus or the file is missing, damaged or too small.
    """
    sampled_fingerprint: str | None = None
    first_new = None
    if config.vocabulary is not None:
        vocabulary = read_vocabulary(config.vocabulary.folder)
        sampled_fingerprint = vocabulary.base_tokenizer
        first_new = vocabulary.base_rows
    text = read_fitting_text(config, settings, tokenizer.fingerprint, sampled_fingerprint)
    if first_new is not None:
        base_tokenizer = load_tokenizer(config.base)
        text = with_base_spelling(text, tokenizer, base_tokenizer, _packer(config, tokenizer))
    file = negatives_file(settings)
    if file is not None:
        text = with_kinds(
            text, kept_records(read_kinds(file), settings.leave_out), config, tokenizer
        )
    if first_new is not None:
        text = text.without_tokens_from(first_new)
    return text


def _heldout_windows(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Windows]:
    """The held-out windows of each corpus: its first ones, as many as in validation.

    Raises:
        DataError: there are none, or a corpus is missing, damaged, or of another tokenizer.
    """
    windows: dict[str, Windows] = {}
    heldout = load_heldout(config.data, tokenizer_fingerprint=tokenizer.fingerprint)
    for name, samples in heldout.items():
        first = list(islice(samples, config.validation.max_sequences))
        windows[name] = as_windows(first, is_new=False)
    if not windows:
        raise DataError(
            "gate: no corpus has a held-out part to measure it on; set heldout_input or "
            "heldout_fraction"
        )
    return windows


def _new_text(config: RunConfig, heldout: dict[str, Windows], fit: Fit) -> dict[str, Windows]:
    """The new text on which costs are measured, by corpus.

    It is held-out text. Where no corpus of role new has any, it is text that trained, but was not
    used for fitting the gate.
    """
    new: dict[str, Windows] = {}
    for name, windows in heldout.items():
        if config.data.corpora[name].role == "new":
            new[name] = windows
    if not new:
        name = next(name for name, one in config.data.corpora.items() if one.role == "new")
        is_new = (fit.unused.is_new & fit.unused.present).any(dim=1)
        rows = is_new.nonzero().flatten()[: config.validation.max_sequences]
        new[name] = fit.unused.rows(rows)
    return new


def _changes(
    models: Models,
    stream: BaseStream,
    gate: FittedGate,
    text: FittingText,
    config: RunConfig,
    tokenizer: Tokenizer,
) -> dict[str, KindFigures]:
    """What the gate does where text changes between new and other text within a document."""
    unused = text.unused
    is_of_corpora = (unused.kinds == NO_KIND).all(dim=1)
    is_new = unused.is_new.any(dim=1)
    windows = change_windows(
        document_texts(unused.rows(is_of_corpora & ~is_new), tokenizer),
        document_texts(unused.rows(is_of_corpora & is_new), tokenizer),
        tokenizer,
        _template(config),
        _packer(config, tokenizer),
    )
    if windows is None:
        return {}
    # New tokens are open whatever their score.
    windows = windows.without_tokens_from(models.trained.output.base_columns)
    is_open = (stream.scores(windows, gate) > gate.threshold) | gate.opens_id(windows.tokens)
    return kind_figures(models, gate, windows, is_open, CHANGES, config)


def _packer(config: RunConfig, tokenizer: Tokenizer) -> Packer:
    """What cuts documents into windows as the run's corpora are cut."""
    return Packer(tokenizer, config.data.sequence_length, config.data.document_mask)


def _template(config: RunConfig) -> ChatTemplate | None:
    """The chat template of the run's tokenizer; None if it has none that takes instructions."""
    try:
        template = chat_template(config.tokenizer, today=config.data.chat_date)
        template.opened([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    except DataError:
        return None
    return template


def _open_ids(
    config: RunConfig, settings: OpenIdSettings, model: TrainedModel, fit: Fit
) -> OpenIds:
    """The ids that the gate opens, chosen by the counts of the corpora of role new and of old text.

    Old text is the negatives that were read, and all corpora of role replay. An id that is in the
    negatives never opens.

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
    negatives = torch.cat([fit.self_generated_ids, fit.given_ids])
    # What was read of corpora of role replay is counted twice. It never opens in any case.
    old += np.bincount(negatives.numpy(), minlength=rows)
    return choose_open_ids(
        new[:base_rows],
        old[:base_rows],
        min_count=settings.min_count,
        never=tokenizer.reference.added_ids | frozenset(negatives.tolist()),
    )


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
