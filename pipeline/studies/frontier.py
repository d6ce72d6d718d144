"""The frontier of a study: what each run learned and forgot, with and without its gate, at which cost of inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from pipeline.config.data import Data
from pipeline.config.method import ScaleMethod, title_of
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import newest_checkpoint
from pipeline.conversion.trained_model import TrainedModel, open_trained
from pipeline.data.samples import load_heldout
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import USER_ERROR, StudyError
from pipeline.evaluation.table import over_seeds, readable, table
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
from pipeline.studies.report.drawing import Drawing
from pipeline.studies.report.plots import Plane
from pipeline.studies.report.runs import METHODS, PERPLEXITY, Standing, not_dominated
from pipeline.studies.runs import StudyRun, StudyRuns

_WIDTH, _HEIGHT = 860.0, 560.0  # of the picture


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
    rehearsal: str = "none"
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
    if runs.finished_count() < runs.run_count():
        raise StudyError(
            f"{runs.study.folder}: not all runs are finished; start scale-cpt study again, and it continues", USER_ERROR
        )
    rows: list[FrontierRow] = []
    costs: dict[str, tuple[float, float]] = {}
    for trial in runs.known_trials():
        run, compared = runs.trial(trial), runs.study.methods[trial.method]
        if run.has_diverged:
            continue
        before, *_, after = run.validations()
        if trial.method not in costs:  # rates and seeds cost the same
            costs[trial.method] = relative_cost(run.config)
        if not rows:
            rows.append(_row(run, "Base", "base", _perplexities(before.figures)))
        shares = compared.averages
        found = [(compared.label, False, _perplexities(after.figures))]
        for share, averaged in zip(shares, averaged_perplexities(run.config, shares) if shares else (), strict=True):
            found.append((f"{compared.label}, averaged: {share:g}", False, averaged))
        if run.config.gate is not None:
            heldout = open_record(run.folder / GATE_FOLDER).heldout
            gated = {name: text.gated_perplexity or math.inf for name, text in heldout.items()}
            found.append((compared.label, True, gated))
        method = run.config.method
        for label, is_gated, perplexities in found:
            row = _row(run, label, method.variant if isinstance(method, ScaleMethod) else method.name, perplexities)
            of_run = {
                "gated": is_gated,
                "rehearsal": describe_rehearsal(run.config.data),
                "uses_old_text": run.config.data.fractions.get("replay", 0) > 0,
                "learning_rate": trial.learning_rate,
                "seed": trial.seed,
                "inference_cost": costs[trial.method][0],
                "parameters": costs[trial.method][1],
            }
            rows.append(row.model_copy(update=of_run))
    return rows


def _row(run: StudyRun, label: str, method: str, perplexities: dict[str, float]) -> FrontierRow:
    new, old = (
        geometric_mean([perplexities[name] for name in run.measured_corpora(role)]) for role in ("new", "replay")
    )
    return FrontierRow(label=label, method=method, new_perplexity=new, old_perplexity=old, perplexities=perplexities)


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


def relative_cost(config: RunConfig) -> tuple[float, float]:
    """The FLOPs of a token's forward pass and the parameters of a run's model, relative to its base's.

    A gate decides by one product of vectors, which does not count.
    """
    spec, length = read_spec(config.base), config.data.sequence_length
    with torch.device("meta"), torch.no_grad():
        model, base = training_method(config).build(extended_spec(config, spec), SINGLE, "none"), Decoder(spec)
        flops = [count_flops(decoder, length).total for decoder in (model, base)]
    sizes = [sum(parameter.numel() for parameter in decoder.parameters()) for decoder in (model, base)]
    return flops[0] / flops[1], sizes[0] / sizes[1]


def describe_rehearsal(data: Data) -> str:
    """Such as `own text 1/16 kl` or `replay 1/8 nll`; `none` without any."""
    parts = [
        f"{'own text' if role == 'rehearsal' else role} {Fraction(fraction).limit_denominator(64)} "
        f"{'kl' if role in data.kl_roles else 'nll'}"
        for role, fraction in data.fractions.items()
        if fraction > 0
    ]
    return ", ".join(parts) or "none"


@dataclass(frozen=True)
class Point:
    """A method of the study at one learning rate, with or without its gate: its runs with several seeds."""

    rows: Sequence[FrontierRow]

    @property
    def first(self) -> FrontierRow:
        return self.rows[0]

    @property
    def new(self) -> float:
        """The mean perplexity of the new text."""
        return mean([row.new_perplexity for row in self.rows])

    @property
    def old(self) -> float:
        """The mean perplexity of the base's own text."""
        return mean([row.old_perplexity for row in self.rows])

    @property
    def name(self) -> str:
        """For tables."""
        return self.first.label + (" + gate" if self.first.gated else "")


def points_of(rows: Sequence[FrontierRow]) -> list[Point]:
    """The rows, together where they differ in the seed alone."""
    groups: dict[tuple[object, ...], list[FrontierRow]] = {}
    for row in rows:
        groups.setdefault((row.label, row.gated, row.learning_rate), []).append(row)
    return [Point(group) for group in groups.values()]


def frontier_table(rows: Sequence[FrontierRow]) -> str:
    """Every point, sorted by what it forgot; those that no other point beats in both figures are marked."""
    lines, least = [], math.inf
    for point in sorted(points_of(rows), key=lambda point: (point.old, point.new)):
        first, on_front = point.first, point.new < least
        least = min(least, point.new)
        lines.append(
            [
                point.name,
                "" if first.learning_rate is None else f"{first.learning_rate:g}",
                first.rehearsal,
                over_seeds([row.new_perplexity for row in point.rows], readable),
                over_seeds([row.old_perplexity for row in point.rows], readable),
                f"{first.inference_cost:.2f}",
                f"{first.parameters:.2f}",
                "front" if on_front else "",
            ]
        )
    header = ["", "rate", "rehearsal", "new: perplexity", "old: perplexity", "FLOPs x", "parameters x", ""]
    return table(header, lines)


def frontier_picture(rows: Sequence[FrontierRow]) -> Drawing:
    """The points of a frontier; larger marks cost more. Those that no other point beats are joined and named."""
    base, *others = points_of(rows)
    placed = [
        (point, Standing(math.log(base.new / point.new), math.log(point.old / base.old)))
        for point in others
        if math.isfinite(point.new + point.old)
    ]
    front = sorted(not_dominated(placed), key=lambda pair: pair[1].learned)
    said = [f"{point.name}: {PERPLEXITY.describe(place, 'new text', 'old text')}" for point, place in front]
    drawing = Drawing(_WIDTH, _HEIGHT, "frontier", "What was learned, and what was forgotten", "; ".join(said))
    places, names = [place for _, place in placed], [point.name for point, _ in front]
    plane = Plane(drawing, places, names, PERPLEXITY, "new text", "old text")
    plane.line([place for _, place in front], "rates style-6")
    for point, place in sorted(placed, key=lambda pair: -pair[0].first.inference_cost):
        cost, style = point.first.inference_cost, METHODS.index(point.first.method)
        title = f"{point.name}, {cost:.2f} x the base's FLOPs: {PERPLEXITY.describe(place, 'new', 'old')}"
        drawing.mark(plane.at(place), style, size=0.75 * cost, tooltip=title)
    plane.name([(point.name, place) for point, place in front], places)
    left, top = 150.0, 62.0
    for method in sorted({point.first.method for point in others}, key=METHODS.index):
        drawing.mark((left, top), METHODS.index(method))
        drawing.text((left + 14, top + 4), title_of(method), "label small")
        top += 20
    drawing.text((left - 6, top + 6), "larger marks cost more FLOPs a token", "hint")
    return drawing
