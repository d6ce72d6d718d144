"""The frontier of a study: what each run learned and forgot, with and without its gate, at which cost of inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from pipeline.config.data import Data
from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import newest_checkpoint
from pipeline.conversion.trained_model import TrainedModel, open_trained
from pipeline.data.samples import load_heldout
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import USER_ERROR, StudyError
from pipeline.evaluation.table import over_seeds, readable, table
from pipeline.files import write_json
from pipeline.gating.effect import heldout_perplexities
from pipeline.methods import training_method
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import read_spec
from pipeline.model.new_rows import is_new_row
from pipeline.parallel.topology import SINGLE
from pipeline.run_folder.metrics import Figures, geometric_mean, mean
from pipeline.scale.gate_folder import GATE_FOLDER, open_record
from pipeline.sizing.flops import count_flops
from pipeline.studies.pending import finished_count, known_trials, run_count
from pipeline.studies.results import has_diverged, read_outcome
from pipeline.studies.study_runs import StudyRuns, Trial, measured_corpora

MOST_FORGOTTEN = 0.01
"""By how much the perplexity of the base's own text may rise: the goal for SCALE."""
MOST_FORGOTTEN_BY_FFT = 0.05
"""By how much it may rise under the full fine-tuning that SCALE is compared with."""
WIDE_COST = 1.6
"""The most that inference of a wide expansion may cost, relative to the base's."""
WIDE_GAP = 0.05
"""How much higher its perplexity of the new text may be than that of rehearsed full fine-tuning."""
NO_REHEARSAL = "none"


@dataclass(frozen=True)
class Cost:
    """A model's cost relative to its base's: FLOPs of a token's forward pass, and parameters."""

    flops: float = 1.0
    parameters: float = 1.0


class FrontierRow(BaseModel):
    """A run, or what its gate makes of it. Perplexities are held-out ones, by corpus; `base` is a row too.

    Attributes:
        rehearsal: which share of the training samples keeps the model near its base, and by which loss.
        inference_cost: FLOPs of a forward pass relative to the base's; `parameters` likewise.
        uses_old_text: whether real text of the base's own domain was trained on.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    method: str
    gated: bool = False
    rehearsal: str = NO_REHEARSAL
    uses_old_text: bool = False
    learning_rate: float | None = None
    seed: int | None = None
    new_perplexity: float
    old_perplexity: float
    perplexities: dict[str, float]
    inference_cost: float = 1.0
    parameters: float = 1.0

    def values(self) -> dict[str, object]:
        """The row of summary.json: with the perplexity of each corpus under the corpus's name."""
        own = self.model_dump(exclude={"perplexities"})
        return own | {f"{name}_perplexity": value for name, value in self.perplexities.items()}


def frontier_rows(runs: StudyRuns) -> list[FrontierRow]:
    """The base, every run of a finished study that did not diverge, and every gated model.

    Raises:
        StudyError: some of its runs are not finished.
        RunFolderError, CheckpointError: what a run left is missing or damaged.
    """
    if finished_count(runs) < run_count(runs):
        raise StudyError(
            f"{runs.study.folder}: not all runs are finished; start tools/run_study.py again, and it continues",
            USER_ERROR,
        )
    rows: list[FrontierRow] = []
    costs: dict[str, Cost] = {}
    for trial in known_trials(runs):
        run = runs.trial(trial)
        if has_diverged(run):
            continue
        config, outcome = run.config, read_outcome(run)
        label = runs.study.methods[trial.method].label
        if trial.method not in costs:  # rates and seeds cost the same
            costs[trial.method] = relative_cost(config)
        cost = costs[trial.method]
        if not rows:
            rows.append(_base_row(config, _perplexities(outcome.before)))
        rows.append(_row(config, trial, label, cost, _perplexities(outcome.after)))
        if shares := runs.study.methods[trial.method].averages:
            for share, averaged in zip(shares, averaged_perplexities(config, shares), strict=True):
                rows.append(_row(config, trial, f"{label}, averaged: {share:g}", cost, averaged))
        if config.gate is not None:
            heldout = open_record(config.folder / GATE_FOLDER).heldout
            gated = {name: text.gated_perplexity or math.inf for name, text in heldout.items()}
            rows.append(_row(config, trial, label, cost, gated, gated=True))
    return rows


def _row(
    config: RunConfig, trial: Trial, label: str, cost: Cost, perplexities: dict[str, float], *, gated: bool = False
) -> FrontierRow:
    method = config.method
    return _base_row(config, perplexities).model_copy(
        update={
            "label": label,
            "method": method.variant if isinstance(method, ScaleMethod) else method.name,
            "gated": gated,
            "rehearsal": describe_rehearsal(config.data),
            "uses_old_text": config.data.fractions.get("replay", 0) > 0,
            "learning_rate": trial.learning_rate,
            "seed": trial.seed,
            "inference_cost": cost.flops,
            "parameters": cost.parameters,
        }
    )


def _base_row(config: RunConfig, perplexities: dict[str, float]) -> FrontierRow:
    new, old = (
        geometric_mean([perplexities[name] for name in measured_corpora(config, role)]) for role in ("new", "replay")
    )
    return FrontierRow(label="Base", method="base", new_perplexity=new, old_perplexity=old, perplexities=perplexities)


def _perplexities(figures: Figures) -> dict[str, float]:
    return {name: own["perplexity"] for name, own in figures.items()}


@dataclass(frozen=True)
class AveragedModel(TrainedModel):
    """A fully fine-tuned model whose weights are averaged with its base's: `share` of the trained ones.

    The base has no rows of an extended vocabulary: they stay what they became.
    """

    share: float = 0.5

    def read_stored(self, name: str) -> Tensor:
        if is_new_row(name):
            return super().read_stored(name)
        base = self.base.read(self.method.base_name(name, self.base.spec)).float()
        return torch.lerp(base, self.reader.read(name), self.share) if name in self.trained else base


def averaged_perplexities(config: RunConfig, shares: Sequence[float]) -> list[dict[str, float]]:
    """The held-out perplexities, by corpus, of a finished run's weights averaged with its base's, for each share.

    Raises:
        CheckpointError, BaseModelError, DataError: what is read is missing or damaged.
    """
    trained = open_trained(newest_checkpoint(config), config.base)
    own = {field.name: getattr(trained, field.name) for field in fields(trained)}
    heldout = load_heldout(config.data, tokenizer_fingerprint=load_tokenizer(config.tokenizer).fingerprint)
    return [heldout_perplexities(AveragedModel(**own, share=share), heldout, config) for share in shares]


def relative_cost(config: RunConfig) -> Cost:
    """The cost of inference with the model of a run; a gate decides by one product of vectors, which does not count."""
    spec, length = read_spec(config.base), config.data.sequence_length
    with torch.device("meta"), torch.no_grad():
        model, base = training_method(config).build(extended_spec(config, spec), SINGLE, "none"), Decoder(spec)
        flops = [count_flops(decoder, length).total for decoder in (model, base)]
    sizes = [sum(parameter.numel() for parameter in decoder.parameters()) for decoder in (model, base)]
    return Cost(flops[0] / flops[1], sizes[0] / sizes[1])


def describe_rehearsal(data: Data) -> str:
    """Such as `own text 1/16 kl` or `replay 1/8 nll`; `none` without any."""
    parts = [
        f"{'own text' if role == 'rehearsal' else role} {Fraction(fraction).limit_denominator(64)} "
        f"{'kl' if role in data.kl_roles else 'nll'}"
        for role, fraction in data.fractions.items()
        if fraction > 0
    ]
    return ", ".join(parts) or NO_REHEARSAL


@dataclass(frozen=True)
class Point:
    """A method of the study, with or without its gate: its runs with several seeds."""

    rows: Sequence[FrontierRow]

    @property
    def new(self) -> float:
        """The mean perplexity of the new text."""
        return mean([row.new_perplexity for row in self.rows])

    @property
    def old(self) -> float:
        """The mean perplexity of the base's own text."""
        return mean([row.old_perplexity for row in self.rows])

    @property
    def cost(self) -> float:
        """FLOPs of a forward pass relative to the base's."""
        return self.rows[0].inference_cost

    @property
    def name(self) -> str:
        """For tables."""
        return self.rows[0].label + (" + gate" if self.rows[0].gated else "")


def points_of(rows: Sequence[FrontierRow]) -> list[Point]:
    """The rows, together where they differ in the seed alone."""
    groups: dict[tuple[object, ...], list[FrontierRow]] = {}
    for row in rows:
        groups.setdefault((row.label, row.gated, row.learning_rate), []).append(row)
    return [Point(group) for group in groups.values()]


def frontier_table(rows: Sequence[FrontierRow]) -> str:
    """Every point, sorted by what it forgot; those that no other point beats in both figures are marked."""
    points = sorted(points_of(rows), key=lambda point: (point.old, point.new))
    lines, least = [], math.inf
    for point in points:
        first, on_front = point.rows[0], point.new < least
        least = min(least, point.new)
        lines.append(
            [
                point.name,
                "" if first.learning_rate is None else f"{first.learning_rate:g}",
                first.rehearsal,
                over_seeds([row.new_perplexity for row in point.rows], readable),
                over_seeds([row.old_perplexity for row in point.rows], readable),
                f"{point.cost:.2f}",
                f"{first.parameters:.2f}",
                "front" if on_front else "",
            ]
        )
    header = ["", "rate", "rehearsal", "new: perplexity", "old: perplexity", "FLOPs x", "parameters x", ""]
    return table(header, lines)


def goals(rows: Sequence[FrontierRow]) -> dict[str, bool | None]:
    """Whether the goals hold, by their text; None where the study has no run to decide it by."""
    base, *points = points_of(rows)
    of_scale = [point for point in points if point.rows[0].method in ("preserve", "adapt", "route")]
    of_fft = [point for point in points if point.rows[0].method == "fft"]
    kept = [
        point for point in of_scale if not point.rows[0].uses_old_text and point.old <= (1 + MOST_FORGOTTEN) * base.old
    ]
    rivals = [point for point in of_fft if point.old <= (1 + MOST_FORGOTTEN_BY_FFT) * base.old]
    rehearsed = [point for point in of_fft if point.rows[0].rehearsal != NO_REHEARSAL]
    affordable = [point for point in kept if point.cost <= WIDE_COST]
    no_worse = (
        f"SCALE forgets at most {MOST_FORGOTTEN:.0%} without old data, and learns no less than any full fine-tuning "
        f"that forgets at most {MOST_FORGOTTEN_BY_FFT:.0%}"
    )
    close = (
        f"SCALE forgets at most {MOST_FORGOTTEN:.0%} without old data, at most at {WIDE_COST} times the base's cost, "
        f"and learns within {WIDE_GAP:.0%} of the best rehearsed full fine-tuning"
    )
    return {
        no_worse: _best(kept) <= _best(rivals) if kept and rivals else False if rivals else None,
        close: _best(affordable) <= (1 + WIDE_GAP) * _best(rehearsed) if rehearsed else None,
    }


def _best(points: Sequence[Point]) -> float:
    return min((point.new for point in points), default=math.inf)


def write_frontier(path: Path, rows: Sequence[FrontierRow]) -> None:
    """Writes the rows to `path` as JSON."""
    write_json(path, [row.values() for row in rows])
