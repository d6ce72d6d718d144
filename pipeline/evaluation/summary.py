"""The summary of a finished run: the scores of base and export, the cost, and where results are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.config.method import ScaleMethod, title_of
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import HF_FOLDER
from pipeline.conversion.export_format import VERIFICATION
from pipeline.conversion.model_card import add_to_card, markdown_table
from pipeline.data.sources.object_stores import RemoteFile
from pipeline.data.tokenize.corpora import check_heldout, heldout_corpora
from pipeline.data.tokenize.input_files import input_files
from pipeline.errors import CheckpointError, ConversionError, UserError
from pipeline.evaluation.evaluator import RunEvaluation, run_evaluators
from pipeline.evaluation.perplexity import DEFAULT_BYTES, Prefix, Score, score_folder
from pipeline.evaluation.table import score_table, table
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_object, write_json
from pipeline.gating.folder import GATE_FOLDER, GateRecord, open_record
from pipeline.gating.open_old_text import warn_of_open_old_text
from pipeline.hf.folder_kinds import EXPORT
from pipeline.run_folder.status import SUMMARY, TRAINING_FILE

_logger = log.get_logger(__name__)


def summarise(
    config: RunConfig,
    *,
    max_bytes: int = DEFAULT_BYTES,
    prefix: Prefix = "document",
    asked: Mapping[str, RunEvaluation] | None = None,
) -> str:
    """Scores the base and the exported model of a finished run, and writes `summary.json`.

    An earlier summary of the same base, export and texts is completed: its perplexities are kept
    where anything is `asked`, and what is not `asked` always.

    Args:
        config: the run, on whose held-out texts both are scored.
        max_bytes: how much of each text is scored; see `score_folder`.
        prefix: what documents are scored after; see `score_folder`.
        asked: what both are scored by beside texts, by the names of evaluators; these scores also
            go to the model card.

    Returns:
        A table of the results, and where they are.

    Raises:
        CheckpointError: the training of the run is not finished.
        ConversionError: it is not converted.
    """
    hf_folder = config.folder / HF_FOLDER
    summary = config.folder / SUMMARY
    _logger.info("%s: evaluating the base and the export", config.folder)
    training = _result(
        config.folder / TRAINING_FILE, CheckpointError, "the run must be trained to its end first"
    )
    verification = _result(hf_folder / VERIFICATION, ConversionError, "run scale-cpt convert first")
    gate = None
    if config.gate is not None:
        gate = open_record(config.folder / GATE_FOLDER)
    asked = asked or {}
    for evaluation in asked.values():
        evaluation.read()
    scored_for = _scored_for(config, max_bytes=max_bytes, prefix=prefix)
    earlier = _earlier(summary, scored_for)

    if asked and earlier is not None:
        options = " and ".join(f"--{name}" for name in asked)
        _logger.info(
            "%s: its perplexities stay; without %s they are scored again", summary, options
        )
        scores: dict[str, dict[str, Score]] = {}
        for when, found in earlier["scores"].items():
            scores[when] = _scores_of(found)
    else:
        scores = {}
        for when, folder in _folders(config).items():
            scores[when] = score_folder(
                folder,
                heldout_corpora(config),
                # The length of training for both models, whatever their own contexts: a longer
                # window alone lowers perplexity.
                context=config.data.sequence_length,
                max_bytes=max_bytes,
                prefix=prefix,
            )

    further: dict[str, dict[str, Any]] = {}
    for evaluator in run_evaluators():
        further[evaluator] = earlier[evaluator] if earlier is not None else {}
    for evaluator, evaluation in asked.items():
        further[evaluator] = {}
        for when, folder in _folders(config).items():
            further[evaluator][when] = evaluation.scores(folder)

    fraction = training["trainable_parameters"] / training["total_parameters"]
    values = {
        **training,
        "trained_fraction": fraction,
        "export_max_abs_logit_difference": verification["max_abs"],
        "hf_folder": str(hf_folder),
        "scores": scores,
        "scored_for": scored_for,
        **further,
    }
    if gate is not None:
        values["gate_open"] = {name: text.open_fraction for name, text in gate.heldout.items()}
        values["gate_closed_samples"] = {
            name: text.closed_sequences for name, text in gate.heldout.items()
        }
        values["closed_max_abs_logit_difference"] = gate.closed_max_abs_logit_difference
    write_json(summary, values)
    if gate is not None and config.gate is not None:
        warn_of_open_old_text(gate, config.gate.max_open_fraction)

    name = _method_title(config)
    columns = _gate_columns(gate, name) if gate is not None else None
    tables = [score_table({"base": scores["before"], name: scores["after"]}, columns)]
    for evaluator, evaluation in asked.items():
        found = further[evaluator]
        head, rows = evaluation.rows({"base": found["before"], name: found["after"]})
        tables.append(table(head, rows))
        in_markdown = markdown_table([evaluation.scored, *head[1:]], rows)
        add_to_card(hf_folder, evaluation.title, in_markdown)
    return "\n\n".join([*tables, _notes(config, fraction), _places(config)])


def _notes(config: RunConfig, trained_fraction: float) -> str:
    """What a reader of the tables must know."""
    notes = (
        f"{_method_title(config)} trained {trained_fraction:.1%} of the parameters. "
        "Whole documents, in windows that overlap; the log of\n"
        "training scores packed sequences, which cut them."
    )
    if config.gate is not None:
        notes += (
            "\nOpen is the share of tokens that the gate opens. A sample on which it never opens "
            "kept every\nlogit of the base, to the bit. Both are of training's held-out samples."
        )
    if config.vocabulary is not None:
        notes += "\nTwo tokenizers: only bits per byte can be compared."
    return notes


def _gate_columns(gate: GateRecord, model: str) -> dict[str, dict[tuple[str, str], str]]:
    """On how much of each corpus the gate opens, and how much keeps the base's logits whole."""
    is_open: dict[tuple[str, str], str] = {}
    is_kept: dict[tuple[str, str], str] = {}
    for corpus, text in gate.heldout.items():
        is_open[model, corpus] = f"{text.open_fraction:.2%}"
        is_kept[model, corpus] = f"{text.closed_sequences} of {text.sequences}"
    return {"open": is_open, "kept every logit": is_kept}


def _places(config: RunConfig) -> str:
    """Where the results are."""
    return (
        f"{'Hugging Face folder':<20} {config.folder / HF_FOLDER}\n"
        f"{'this summary':<20} {config.folder / SUMMARY}"
    )


def _folders(config: RunConfig) -> dict[str, Path]:
    """The models that are compared."""
    return {"before": config.base, "after": config.folder / HF_FOLDER}


def _method_title(config: RunConfig) -> str:
    if isinstance(config.method, ScaleMethod):
        return title_of(config.method.variant)
    return title_of(config.method.name)


def _scores_of(recorded: dict[str, Any]) -> dict[str, Score]:
    """The scores of a model, as an earlier summary recorded them: null stands for infinity."""
    scores: dict[str, Score] = {}
    for name, fields in recorded.items():
        filled: dict[str, Any] = dict.fromkeys(fields, math.inf)
        filled.update({key: value for key, value in fields.items() if value is not None})
        scores[name] = Score(**filled)
    return scores


def _scored_for(config: RunConfig, *, max_bytes: int, prefix: Prefix) -> dict[str, Any]:
    """What the scores of a run depend on: base, export, held-out texts, and how they are scored."""
    texts: dict[str, list[list[Any]]] = {}
    for name, corpus in check_heldout(config).items():
        texts[name] = []
        for file, size in input_files(corpus.input).items():
            if isinstance(file, RemoteFile):
                # Its store gives a tag that changes with its content.
                texts[name].append([str(file), size, file.identity()])
            else:
                # By size and time, not by hash: texts may be large, and a changed text has another
                # time.
                texts[name].append([str(file), size, file.stat().st_mtime_ns])
    hf_folder = config.folder / HF_FOLDER
    return {
        "base": str(config.base),
        "base_config": file_hash(config.base / "config.json"),
        # These records hold the hashes of the export's inputs, so that its weights are not hashed.
        "export": file_hash(hf_folder / VERIFICATION),
        "export_record": file_hash(hf_folder / EXPORT.record),
        "context": config.data.sequence_length,
        "max_bytes": max_bytes,
        "prefix": prefix,
        "texts": texts,
    }


def _earlier(path: Path, scored_for: dict[str, Any]) -> dict[str, Any] | None:
    """The summary at `path`, if it is whole and of the same base, export and texts."""
    try:
        found = read_object(path, ConversionError)
    except (FileNotFoundError, ConversionError):
        # A damaged summary is made again, as a missing one is.
        return None
    if found.get("scored_for") != scored_for:
        return None
    for part in ("scores", *run_evaluators()):
        if not isinstance(found.get(part), dict):
            return None
    return found


def _result(path: Path, error: type[UserError], advice: str) -> dict[str, Any]:
    """What an earlier stage wrote to `path`."""
    try:
        return read_object(path, error)
    except FileNotFoundError:
        raise error(f"{path}: no such file; {advice}") from None
