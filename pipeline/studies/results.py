"""The results of runs as rows: those of a study's summary.json, or that of a single run's folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.errors import RunFolderError
from pipeline.files import first_fault, read_bytes, read_object
from pipeline.run_folder.metrics import METRICS, Figures, ValidationRecord, read_history
from pipeline.run_folder.status import TRAINING, is_trained

SUMMARY = "summary.json"
REPLAY = "replay"
"""The role of corpora that must not be forgotten."""
_FROM_TRAINING = ("trainable_parameters", "total_parameters", "tokens_seen", "seconds")
"""What a row takes from training.json."""


class Row(BaseModel):
    """A row of summary.json: a run, or what its gate or an average with its base makes of it.

    Files from elsewhere may lack what is optional.

    Attributes:
        chosen: whether the run has the learning rate of its method that was chosen. `after` is empty where it diverged.
        inference_cost: the FLOPs of a forward pass over the base's.
        source: the folder that a report has read it from.
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

    @property
    def validations(self) -> list[ValidationRecord]:
        """Every validation, from step 0 to the last step."""
        first = ValidationRecord(step=0, figures=self.before)
        return [first, *self.during, ValidationRecord(step=self.steps, figures=self.after)]


_ROWS = TypeAdapter(Annotated[list[Row], Field(min_length=1)])


def recorded(folder: Path) -> dict[str, Any]:
    """What the folder of a run, finished or not, says for its row.

    Raises:
        RunFolderError: its metrics are missing, or have no validation after the first.
    """
    history = read_history(folder / METRICS)
    before, *during, after = history.validations
    trained = read_object(folder / TRAINING, RunFolderError) if is_trained(folder) else {}
    return {
        **{key: trained[key] for key in _FROM_TRAINING if key in trained},
        "learning_rate": history.learning_rate,
        "steps": after.step,
        "peak_memory_gib": history.peak_memory_gib,
        "roles": {name: REPLAY if name in history.forgetting else "new" for name in before.figures},
        "before": before.figures,
        "during": during,
        "after": after.figures,
    }


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
            f"{path}: no such file; expected a study's folder, where scale-cpt study writes it at the end, or a run's "
            f"with its {METRICS}"
        ) from None
    except ValidationError as error:
        raise RunFolderError(f"{path}: {first_fault(error)}; write or copy the file again") from None


def read_runs(folders: Iterable[Path]) -> list[Row]:
    """The rows of each folder: all of a study's summary.json, or that of a single run.

    Raises:
        RunFolderError: a folder is neither, a file in it cannot be read, or the runs have different bases.
    """
    unique = list(dict.fromkeys(path.resolve() for path in folders))
    names = [folder.name for folder in unique]
    runs: list[Row] = []
    for folder in unique:
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        rows = [_row_of_run(folder, name)] if (folder / METRICS).is_file() else read_rows(folder)
        runs += [row.model_copy(update={"source": name}) for row in rows]
    _check_same_base(runs)
    return runs


def _row_of_run(folder: Path, name: str) -> Row:
    """The row of a run's folder, with what `scale-cpt evaluate --chats` measured."""
    row = recorded(folder)
    summary = read_object(folder / SUMMARY, RunFolderError) if (folder / SUMMARY).is_file() else {}
    for when, files in summary.get("chats", {}).items():
        for chats, score in files.items():
            row[when][chats] = {key: value for key, value in score.items() if key != "chats"}
            row["roles"][chats] = REPLAY
    return Row(**row, label=name)


def _check_same_base(runs: Sequence[Row]) -> None:
    """Raises RunFolderError where two runs began with other figures of a corpus: distances from the base would lie."""
    first: dict[tuple[str, str], tuple[Row, float]] = {}
    for run in runs:
        for corpus, figures in run.before.items():
            for name in figures.keys() & {"perplexity", "bits_per_byte"}:
                other, expected = first.setdefault((corpus, name), (run, figures[name]))
                # The same base differs by rounding only: by the dtype and the number of ranks.
                if not math.isclose(figures[name], expected, rel_tol=0.02):
                    raise RunFolderError(
                        f"{other.source} and {run.source}: the base of {other.label} has a {name} of "
                        f"{expected:.4g} on {corpus}, that of {run.label} {figures[name]:.4g}: they differ in "
                        "base, tokenizer or held-out text; report them apart"
                    )
