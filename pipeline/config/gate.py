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
    """how often an id must occur in the corpora of role new; its share of their tokens must also be
    above a hundred times its share of old text"""


class GateSettings(Section):
    """The gate, which decides per token whether the text is new (docs/gate.md). Methods scale,
    lora and fft only.

    It is fitted after training.
    """

    features: GateFeatures = "token+running_mean"
    """what the gate reads of the base's residual stream: each token's state, or also the running
    mean of the states in the document so far"""
    layer: NonNegativeInt | None = None
    """index of the layer before which the gate reads the stream; default: the last place where the
    stream is exactly the base's, which is after the last layer for preserve and route, before layer
    l_fp for adapt, and before layer own_first_layer where open tokens have weights of their own; 2
    where that would be 0, and for fft. Layers from there to a gate that reads further up run twice,
    for fft all layers below the gate"""
    negatives: list[CorpusName] = []
    """names of the corpora on whose text the gate learns to stay closed; default: the corpora of
    role self_generated, or the corpora of role replay if there are none"""
    negatives_file: Path | Literal["shipped"] | None = "shipped"
    """further text on which the gate learns to stay closed, of many kinds: JSON lines with `kind`
    and `text`; shipped: the languages, scripts, code, formulas and tables that come with scale-cpt;
    null: none. Kinds that look like the new text are left out"""
    leave_out: list[str] = []
    """further kinds of negatives_file that are left out, on which the gate may open; such as nb for
    Norwegian"""
    tokens: PositiveInt = 100_000
    """number of tokens of each part of the text (new, negatives, negatives_file) on which the gate
    is fitted; as many further tokens of each part test it"""
    splices: bool = False
    """whether the gate is also fitted on windows that begin in one kind of text and end in the
    other"""
    threshold_rule: ThresholdRule = "max_cost"
    """which of the settings below sets the threshold. With max_cost it is as high as the new
    text allows, and the gate stays closed in doubt; with max_open_fraction as low as the other text
    allows"""
    max_cost: Annotated[float, Field(gt=0)] = 0.01
    """by what share the gate may raise the perplexity of new text, behind the first tokens of each
    document"""
    max_closed_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """largest share of new text, behind the first tokens of each document, that max_cost may close:
    it counts where training gained little, so that closing costs little"""
    max_open_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """largest share of the tokens of text that is not new on which the gate may open; where more
    are open, a warning says so"""
    open_ids: OpenIdSettings | None = OpenIdSettings()
    """which ids the gate opens whatever their score, as no negative has them; null: no ids"""
