"""The summary of a finished run: its scores before and after, its cost, and the paths of its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.method import ScaleMethod, title_of
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import HF_FOLDER, VERIFICATION
from pipeline.data.corpora import heldout_corpora
from pipeline.errors import CheckpointError, ConversionError
from pipeline.evaluation.perplexity import DEFAULT_BYTES, Prefix, Score, score_folder
from pipeline.evaluation.table import limit_note, readable, table
from pipeline.files import read_object, write_json
from pipeline.run_folder.status import TRAINING
from pipeline.scale.gate_folder import GATE_FOLDER, open_record

SUMMARY = "summary.json"
# The values of training.json that the summary repeats.
_FROM_TRAINING = (
    "step0_max_abs_logit_difference",
    "trainable_parameters",
    "total_parameters",
    "optimizer_state_elements",
    "steps",
    "tokens_seen",
    "seconds",
    "checkpoint",
    "tensorboard",
)

Scores = Mapping[str, Score]
"""By the corpus's name."""


def summarise(config: RunConfig, *, max_bytes: int = DEFAULT_BYTES, prefix: Prefix = "document") -> str:
    """Scores the base and the exported model on the run's held-out texts; writes `summary.json` into its folder.

    A run in `<folder>-fft` is scored for comparison. `max_bytes` and `prefix` are those of `score_folder`. Returns a
    table of the results, and where they are.

    Raises:
        CheckpointError: the training of a run is not finished.
        ConversionError: a run is not converted.
    """

    def scores(folder: Path) -> Scores:
        context = config.data.sequence_length
        return score_folder(folder, heldout_corpora(config), context=context, max_bytes=max_bytes, prefix=prefix)

    training, verification = _read_results(config.folder)
    compared = config.folder.with_name(f"{config.folder.name}-fft")
    compared_training = _read_results(compared)[0] if (compared / HF_FOLDER).exists() else None
    gate = open_record(config.folder / GATE_FOLDER) if config.gate is not None else None
    before, after = scores(config.base), scores(config.folder / HF_FOLDER)

    values: dict[str, Any] = {key: training[key] for key in _FROM_TRAINING if key in training}
    values["trained_fraction"] = _trained_fraction(training)
    values |= _flat(before, "before") | _flat(after, "after")
    values["rehearsal_fraction"] = config.data.fractions.get("rehearsal", 0)
    if gate is not None:
        values |= {f"gate_open_{name}": text.open_fraction for name, text in gate.heldout.items()}
        values["closed_max_abs_logit_difference"] = gate.closed_max_abs_logit_difference
    values["export_max_abs_logit_difference"] = verification["max_abs"]
    values["hf_folder"] = str(config.folder / HF_FOLDER)
    values["scores"] = {"before": before, "after": after}
    method = config.method
    name = title_of(method.variant if isinstance(method, ScaleMethod) else method.name)
    rows = [_row("base", "", before), _row(name, f"{_trained_fraction(training):.1%}", after)]
    if compared_training is not None:
        compared_scores = scores(compared / HF_FOLDER)
        values["comparison"] = {
            "method": "fft",
            "trainable_parameters": compared_training["trainable_parameters"],
            **_flat(compared_scores, "after"),
            "hf_folder": str(compared / HF_FOLDER),
        }
        rows.append(_row("full fine-tuning", f"{_trained_fraction(compared_training):.1%}", compared_scores))
    write_json(config.folder / SUMMARY, values)

    header = ["", "trained", *(cell for corpus in before for cell in (f"{corpus}: perplexity", "bits per byte"))]
    notes = ["Whole documents, in windows that overlap; the log of training scores packed sequences, which cut them."]
    if config.vocabulary is not None:
        notes.append("Two tokenizers: only bits per byte can be compared.")
    paths = {
        "TensorBoard": training.get("tensorboard"),
        "checkpoint": training.get("checkpoint"),
        "Hugging Face folder": config.folder / HF_FOLDER,
        "this summary": config.folder / SUMMARY,
    }
    notes += filter(None, [limit_note({"": after})])
    return "\n".join([table(header, rows), "", *notes, "", *(f"{label:<20} {path}" for label, path in paths.items())])


def _read_results(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of the run's training.json, and of its export's verification.json."""
    path = folder / TRAINING
    try:
        training = read_object(path, CheckpointError, "train the run again")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the run must be trained to its end first") from None
    path = folder / HF_FOLDER / VERIFICATION
    try:
        return training, read_object(path, ConversionError, "convert the run again")
    except FileNotFoundError:
        raise ConversionError(f"{path}: no such file; run tools/convert_checkpoint.py first") from None


def _trained_fraction(training: Mapping[str, Any]) -> float:
    return float(training["trainable_parameters"]) / float(training["total_parameters"])


def _row(label: str, trained: str, scores: Scores) -> list[str]:
    figures = ((readable(score.perplexity), f"{score.bits_per_byte:.3f}") for score in scores.values())
    return [label, trained, *(cell for pair in figures for cell in pair)]


def _flat(scores: Scores, when: str) -> dict[str, float]:
    flat = {}
    for corpus, score in scores.items():
        flat[f"{corpus}_perplexity_{when}"] = score.perplexity
        flat[f"{corpus}_bits_per_byte_{when}"] = score.bits_per_byte
    return flat
