"""The section `gate` of a run configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.data import CorpusName
from pipeline.config.reading import NonNegativeInt, PositiveInt, Section

GateFeatures = Literal["token", "token+running_mean"]
ThresholdRule = Literal["max_cost", "max_open_fraction"]


class OpenIdSettings(Section):
    """Which ids the gate opens whatever their score, because no text that is not new has them."""

    min_count: PositiveInt = 20
    """occurrences in the corpora of role new that an id needs (docs/gate.md)"""


class GateSettings(Section):
    """The gate, which decides per token whether the text is new (docs/gate.md). Methods scale,
    lora and fft only.

    It is fitted after training.
    """

    features: GateFeatures = "token+running_mean"
    """what the gate reads: each token's state, or also the running mean of its document"""
    layer: NonNegativeInt | None = None
    """layer before which the gate reads the base's stream (docs/gate.md); default: the last where
    nothing has changed it, or 2 where that is 0, and for fft"""
    negatives: list[CorpusName] = []
    """corpora on which it learns to stay closed; default: those of role self_generated, or else
    replay"""
    negatives_file: Path | Literal["shipped"] | None = "shipped"
    """further such text of many kinds, lines of JSON with `kind` and `text`; shipped: the file that
    comes with scale-cpt; null: none"""
    leave_out: list[str] = []
    """kinds of negatives_file that are left out, such as nb for Norwegian"""
    tokens: PositiveInt = 100_000
    """tokens of each part (new, negatives, negatives_file) for fitting, and as many for testing"""
    splices: bool = False
    """also fits on windows that change from one kind of text to the other"""
    threshold_rule: ThresholdRule = "max_cost"
    """what sets the threshold: max_cost, as high as the new text allows, or max_open_fraction, as
    low as the other text allows"""
    max_cost: Annotated[float, Field(gt=0)] = 0.01
    """largest rise of the perplexity of new text by the gate, as a share"""
    max_closed_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """largest share of new text that max_cost may close"""
    max_open_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """largest share of other text that may open; a warning names more"""
    open_ids: OpenIdSettings | None = OpenIdSettings()
    """ids that are open whatever their score; null: none"""
