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
    """occurrences in the corpora of role new that an id needs; its share there must also be above a
    hundred times that of old text"""


class GateSettings(Section):
    """The gate, which decides per token whether the text is new (docs/gate.md). Methods scale,
    lora and fft only.

    It is fitted after training.
    """

    features: GateFeatures = "token+running_mean"
    """what the gate reads of the base's stream: each token's state, or also the running mean of its
    document"""
    layer: NonNegativeInt | None = None
    """layer before which the gate reads the stream; default: the last place where it is exactly the
    base's: after the last layer (preserve, route), before l_fp (adapt) or open_first_layer (open
    weights), but 2 where that is 0, and for fft"""
    negatives: list[CorpusName] = []
    """corpora on whose text the gate learns to stay closed; default: those of role self_generated,
    or else of role replay"""
    negatives_file: Path | Literal["shipped"] | None = "shipped"
    """further text on which it learns to stay closed, of many kinds: JSON lines with `kind` and
    `text`; shipped: the file that comes with scale-cpt; null: none"""
    leave_out: list[str] = []
    """further kinds of negatives_file that are left out, such as nb for Norwegian"""
    tokens: PositiveInt = 100_000
    """tokens of each part (new, negatives, negatives_file) on which the gate is fitted; as many
    more test it"""
    splices: bool = False
    """whether it is also fitted on windows that change from one kind of text to the other"""
    threshold_rule: ThresholdRule = "max_cost"
    """which setting below sets the threshold: as high as the new text allows, closed in doubt
    (max_cost), or as low as the other text allows"""
    max_cost: Annotated[float, Field(gt=0)] = 0.01
    """share by which the gate may raise the perplexity of new text, behind the first tokens of a
    document"""
    max_closed_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """largest share of new text, behind the first tokens, that max_cost may close: it counts where
    training gained little"""
    max_open_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """largest share of other text on which the gate may open; a warning names more"""
    open_ids: OpenIdSettings | None = OpenIdSettings()
    """ids that are open whatever their score, as no negative has them; null: none"""
