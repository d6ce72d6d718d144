"""The section `gate` of a run configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.data import CorpusName
from pipeline.config.reading import NonNegativeInt, PositiveInt, Section

GateFeatures = Literal["token", "token+running_mean"]


class OpenIdSettings(Section):
    """Which ids the gate opens whatever their score, because old text hardly ever has them."""

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
    tokens: PositiveInt = 100_000
    """number of tokens of each kind of text (new, and not new) on which the gate is fitted; as many
    further tokens of each kind set its threshold"""
    splices: bool = False
    """whether the gate is also fitted on windows that begin in one kind of text and end in the
    other"""
    max_open_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """largest share of the tokens of text that is not new on which the gate may open; it sets the
    threshold"""
    open_ids: OpenIdSettings | None = OpenIdSettings()
    """which ids the gate opens whatever their score, as old text hardly ever has them; null: no
    ids"""
