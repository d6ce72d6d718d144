"""The summary of a finished run: its scores before and after, its cost, and the paths of its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt

from pipeline.config.method import ScaleMethod, title_of
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import HF_FOLDER, VERIFICATION
from pipeline.data.corpora import heldout_corpora
from pipeline.errors import CheckpointError, ConversionError
from pipeline.evaluation.perplexity import DEFAULT_BYTES, Prefix, Score, score_folder
from pipeline.evaluation.table import limit_note, readable, table
from pipeline.files import read_record, write_json
from pipeline.run_folder.status import TRAINING
from pipeline.scale.gate_folder import GATE_FOLDER, GateRecord, open_record

SUMMARY = "summary.json"
COMPARISON_SUFFIX = "-fft"
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


@dataclass(frozen=True)
class FinishedRun:
    """A trained and converted run: its folder, the contents of training.json, and of its export's verification.json."""

    folder: Path
    training: Mapping[str, Any]
    verification: Mapping[str, Any]

    @property
    def hf_folder(self) -> Path:
        """The exported model."""
        return self.folder / HF_FOLDER

    @property
    def trained_fraction(self) -> float:
        """The fraction of the parameters that was trained."""
        return float(self.training["trainable_parameters"]) / float(self.training["total_parameters"])


class _Trained(BaseModel):
    """What the summary needs of training.json."""

    model_config = ConfigDict(extra="allow")

    trainable_parameters: int
    total_parameters: PositiveInt


class _Verified(BaseModel):
    """What it needs of verification.json."""

    model_config = ConfigDict(extra="allow")

    max_abs: float | None


def open_run(folder: Path) -> FinishedRun:
    """The finished run in `folder`.

    Raises:
        CheckpointError: its training is not finished.
        ConversionError: it has not been converted.
    """
    try:
        training = read_record(folder / TRAINING, _Trained, CheckpointError, "train the run again").model_dump()
    except FileNotFoundError:
        raise CheckpointError(f"{folder / TRAINING}: no such file; the run must be trained to its end first") from None
    try:
        path = folder / HF_FOLDER / VERIFICATION
        verification = read_record(path, _Verified, ConversionError, "convert the run again").model_dump()
    except FileNotFoundError:
        raise ConversionError(
            f"{folder / HF_FOLDER}: no verified model; run tools/convert_checkpoint.py first"
        ) from None
    return FinishedRun(folder, training, verification)


@dataclass(frozen=True)
class RunSummary:
    """Everything that the table and summary.json show.

    `gate` is the record of the run's gate, and `comparison` the full fine-tuning run, if there is one.
    """

    config: RunConfig
    run: FinishedRun
    before: Scores
    after: Scores
    gate: GateRecord | None = None
    comparison: tuple[FinishedRun, Scores] | None = None

    def as_json(self) -> dict[str, Any]:
        """The contents of summary.json."""
        values: dict[str, Any] = {key: self.run.training[key] for key in _FROM_TRAINING if key in self.run.training}
        values["trained_fraction"] = self.run.trained_fraction
        values |= _flat(self.before, "before") | _flat(self.after, "after")
        values["rehearsal_fraction"] = self.config.data.fractions.get("rehearsal", 0)
        if self.gate is not None:
            values |= {f"gate_open_{name}": text.open_fraction for name, text in self.gate.heldout.items()}
            values["closed_max_abs_logit_difference"] = self.gate.closed_max_abs_logit_difference
        values["export_max_abs_logit_difference"] = self.run.verification["max_abs"]
        values["hf_folder"] = str(self.run.hf_folder)
        values["scores"] = {"before": self.before, "after": self.after}
        if self.comparison:
            other, scores = self.comparison
            values["comparison"] = {
                "method": "fft",
                "trainable_parameters": other.training["trainable_parameters"],
                **_flat(scores, "after"),
                "hf_folder": str(other.hf_folder),
            }
        return values

    def as_text(self) -> str:
        """The table, and where the results are."""
        method = self.config.method
        name = title_of(method.variant if isinstance(method, ScaleMethod) else method.name)
        rows = [self._row("base", None, self.before), self._row(name, self.run, self.after)]
        if self.comparison:
            rows.append(self._row("full fine-tuning", *self.comparison))
        header = ["", "trained"]
        for corpus in self.before:
            header += [f"{corpus}: perplexity", "bits per byte"]
        paths = {
            "TensorBoard": self.run.training.get("tensorboard"),
            "checkpoint": self.run.training.get("checkpoint"),
            "Hugging Face folder": self.run.hf_folder,
            "this summary": self.run.folder / SUMMARY,
        }
        note = [
            "Whole documents, in windows that overlap; the log of training scores packed sequences, which cut them."
        ]
        if self.config.vocabulary is not None:
            note.append("Two tokenizers: only bits per byte can be compared.")
        note += filter(None, [limit_note({"": self.after})])
        return "\n".join([table(header, rows), "", *note, "", *(f"{name:<20} {path}" for name, path in paths.items())])

    def _row(self, label: str, run: FinishedRun | None, scores: Scores) -> list[str]:
        cells = [label, f"{run.trained_fraction:.1%}" if run else ""]
        for corpus in self.before:
            cells += [readable(scores[corpus].perplexity), f"{scores[corpus].bits_per_byte:.3f}"]
        return cells


def summarise(config: RunConfig, *, max_bytes: int = DEFAULT_BYTES, prefix: Prefix = "document") -> RunSummary:
    """Scores the base and the exported model on the run's held-out texts, and writes `summary.json` into its folder.

    A run in `<folder>-fft` is scored for comparison. `max_bytes` and `prefix` are those of `score_folder`.
    """
    run = open_run(config.folder)

    def scores(folder: Path) -> Scores:
        context = config.data.sequence_length
        return score_folder(folder, heldout_corpora(config), context=context, max_bytes=max_bytes, prefix=prefix)

    comparison = None
    other_folder = config.folder.with_name(config.folder.name + COMPARISON_SUFFIX)
    if (other_folder / HF_FOLDER).exists():
        other = open_run(other_folder)
        comparison = other, scores(other.hf_folder)
    gate = open_record(config.folder / GATE_FOLDER) if config.gate is not None else None
    summary = RunSummary(config, run, scores(config.base), scores(run.hf_folder), gate, comparison)
    write_json(config.folder / SUMMARY, summary.as_json())
    return summary


def _flat(scores: Scores, when: str) -> dict[str, float]:
    flat = {}
    for corpus, score in scores.items():
        flat[f"{corpus}_perplexity_{when}"] = score.perplexity
        flat[f"{corpus}_bits_per_byte_{when}"] = score.bits_per_byte
    return flat
