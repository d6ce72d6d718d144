"""The results of runs as rows: those of a study's summary.json, or that of a run's folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.config.sources import RUN_FILE, read_settings
from pipeline.errors import RunFolderError
from pipeline.files.json_files import first_fault, read_object
from pipeline.files.reading import read_bytes
from pipeline.gating.folder import GATE_FOLDER, GATE_RECORD, HeldoutText, KindFigures, open_record
from pipeline.run_folder.metrics import METRICS, Figures, ValidationRecord, read_history
from pipeline.run_folder.status import TRAINING_FILE, is_trained

SUMMARY = "summary.json"
REPLAY = "replay"
"""The role of corpora that must not be forgotten."""
_FROM_TRAINING = ("trainable_parameters", "total_parameters", "tokens_seen", "seconds")
"""What a row takes from training.json."""


class Row(BaseModel):
    """A row of summary.json: a run, or a model made of it by its gate or an average with its base.

    Files from elsewhere may lack what is optional.

    Attributes:
        chosen: whether the run has the learning rate that was chosen for its method.
        inference_cost: the FLOPs of a forward pass, divided by the base's.
        source: the folder from which a report has read the row.
        after: the figures at the end by corpus; empty where the run diverged.
        gate_texts: what a gate does to kinds of text, and where text changes, by their names.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    method: str | None = None
    seed: int | None = None
    learning_rate: float | None = None
    chosen: bool = True
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    inference_cost: float | None = None
    steps: int
    tokens_seen: int | None = None
    seconds: float | None = None
    peak_memory_gib: float | None = None
    folder: str | None = None
    source: str = Field(default="", exclude=True)
    roles: dict[str, str]
    before: Figures
    during: list[ValidationRecord] = []
    after: Figures
    gate_texts: dict[str, KindFigures] = {}

    @property
    def validations(self) -> list[ValidationRecord]:
        """Every validation, from step 0 to the last step."""
        first = ValidationRecord(step=0, figures=self.before)
        return [first, *self.during, ValidationRecord(step=self.steps, figures=self.after)]


def with_perplexities(
    row: Row, suffix: str, perplexities: Mapping[str, float], **changes: object
) -> Row:
    """The row of a model that was made of `row`'s without more training.

    Only its perplexities are known. Its label is `row`'s with `suffix`; `changes` are other fields.
    """
    after: Figures = {}
    for name, perplexity in perplexities.items():
        before = row.before[name]
        after[name] = {"perplexity": perplexity}
        # A perplexity of 1 has the logarithm 0, by which nothing can be divided.
        if "bits_per_byte" in before and 1 < before["perplexity"] < math.inf:
            # Of one text, bits per byte are proportional to the logarithm of the perplexity.
            bits = before["bits_per_byte"] * math.log(perplexity) / math.log(before["perplexity"])
            after[name]["bits_per_byte"] = bits
    own: dict[str, object] = {
        "label": f"{row.label}{suffix}",
        "folder": None,
        "during": [],
        "after": after,
    }
    return row.model_copy(update=own | changes)


def gated_perplexities(heldout: Mapping[str, HeldoutText]) -> dict[str, float]:
    """The perplexity of a gated model on each held-out text, as its gate's record has it.

    Texts with impossible tokens are left out: a perplexity without those compares with no other. So
    are texts that predict nothing.
    """
    found: dict[str, float] = {}
    for name, text in heldout.items():
        predicts_nothing = text.ungated_perplexity is None and text.gated_perplexity is None
        if text.impossible_fraction or predicts_nothing:
            continue
        if text.gated_perplexity is None:
            # JSON has no infinity: the record has null in its place.
            found[name] = math.inf
        else:
            found[name] = text.gated_perplexity
    return found


_ROWS = TypeAdapter(Annotated[list[Row], Field(min_length=1)])


def recorded(folder: Path) -> dict[str, Any]:
    """The fields of a run's row that its folder holds, finished or not.

    Raises:
        RunFolderError: its metrics are missing, or have no validation after the first.
    """
    history = read_history(folder / METRICS)
    before, *during, after = history.validations
    # The metrics have no roles, but forgetting is measured on corpora of role replay alone.
    roles: dict[str, str] = {}
    for name in before.figures:
        roles[name] = REPLAY if name in history.forgetting else "new"
    found: dict[str, Any] = {
        "learning_rate": history.learning_rate,
        "steps": after.step,
        "peak_memory_gib": history.peak_memory_gib,
        "roles": roles,
        "before": before.figures,
        "during": during,
        "after": after.figures,
    }
    if is_trained(folder):
        trained = read_object(folder / TRAINING_FILE, RunFolderError)
        for key in _FROM_TRAINING:
            if key in trained:
                found[key] = trained[key]
    return found


def read_rows(folder: Path) -> list[Row]:
    """The rows of a study's summary.json, at least one.

    Raises:
        RunFolderError: the study is not finished, or the file is damaged or of another format.
    """
    path = folder / SUMMARY
    try:
        return _ROWS.validate_json(read_bytes(path, RunFolderError))
    except FileNotFoundError:
        raise RunFolderError(
            f"{path}: no such file; expected a study's folder, where python -m studies run writes "
            f"it at the end, or a run's with its {METRICS}"
        ) from None
    except ValidationError as error:
        raise RunFolderError(
            f"{path}: {first_fault(error)}; write or copy the file again"
        ) from None


def read_runs(folders: Iterable[Path]) -> list[Row]:
    """The rows of each folder: all of a study's summary.json, or that of a single run.

    Raises:
        RunFolderError: a folder is neither, a file in it cannot be read, or the runs have
            different bases.
    """
    unique: list[Path] = []
    for path in folders:
        # The same folder may be named twice, as `runs/a` and `runs/a/`.
        if path.resolve() not in unique:
            unique.append(path.resolve())
    names = [folder.name for folder in unique]
    runs: list[Row] = []
    for folder in unique:
        name = folder.name
        if names.count(name) > 1:
            name = str(folder)
        if (folder / METRICS).is_file():
            rows = _rows_of_run(folder, name)
        else:
            rows = read_rows(folder)
        for row in rows:
            runs.append(row.model_copy(update={"source": name}))
    _check_same_base(runs)
    return runs


def _rows_of_run(folder: Path, name: str) -> list[Row]:
    """The row of a run's folder; of a gated run two, with its gate, as it is exported, and without.

    What `scale-cpt evaluate --chats` measured is of the exported model.
    """
    found = recorded(folder)
    if not _has_gate(folder):
        return [_with_chats(Row(**found, label=name), folder)]
    ungated = Row(**found, label=f"{name} without its gate")
    if not (folder / GATE_FOLDER / GATE_RECORD).exists():
        # A gate is fitted after training.
        return [ungated]
    record = open_record(folder / GATE_FOLDER)
    heldout = record.heldout
    # A corpus that validation does not read has no figures of the base to compare with.
    known = {corpus: text for corpus, text in heldout.items() if corpus in ungated.before}
    gated = with_perplexities(ungated, "", gated_perplexities(known), label=f"{name} + gate")
    gated = gated.model_copy(update={"gate_texts": record.kinds | record.changes})
    gated = _with_chats(gated, folder)
    # The base answered the same chats: only what the ungated model would answer is unknown.
    before = gated.before | ungated.before
    return [gated, ungated.model_copy(update={"before": before, "roles": gated.roles})]


def _has_gate(folder: Path) -> bool:
    """Whether the run is to have a gate, or, where its configuration is missing, has one."""
    if (folder / RUN_FILE).exists():
        return read_settings(folder).get("gate") is not None
    return (folder / GATE_FOLDER / GATE_RECORD).exists()


def _with_chats(row: Row, folder: Path) -> Row:
    """`row` with what `scale-cpt evaluate --chats` measured in the run's folder."""
    if not (folder / SUMMARY).is_file():
        return row
    summary = read_object(folder / SUMMARY, RunFolderError)
    figures = {"before": dict(row.before), "after": dict(row.after)}
    roles = dict(row.roles)
    for when, files in summary.get("chats", {}).items():
        for chats, score in files.items():
            measured = dict(score)
            measured.pop("chats", None)  # their number
            figures[when][chats] = figures[when].get(chats, {}) | measured
            roles[chats] = REPLAY
    return row.model_copy(update={**figures, "roles": roles})


def _check_same_base(runs: Sequence[Row]) -> None:
    """Checks that all runs began with the same figures: distances from two bases do not compare.

    Raises:
        RunFolderError: two runs have different bases, tokenizers or held-out texts.
    """
    first: dict[tuple[str, str], tuple[Row, float]] = {}
    for run in runs:
        for corpus, figures in run.before.items():
            for name in figures.keys() & {"perplexity", "bits_per_byte"}:
                other, expected = first.setdefault((corpus, name), (run, figures[name]))
                # The same base differs by rounding only: by the dtype and the number of ranks.
                if not math.isclose(figures[name], expected, rel_tol=0.02):
                    raise RunFolderError(
                        f"{other.source} and {run.source}: the base of {other.label} has a {name} "
                        f"of {expected:.4g} on {corpus}, that of {run.label} {figures[name]:.4g}: "
                        "they differ in base, tokenizer or held-out text; report them apart"
                    )
