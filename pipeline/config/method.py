"""The section `method` of a run configuration: what trains, and how it starts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import Field, model_validator

from pipeline.config.reading import NonNegativeInt, PositiveFloat, PositiveInt, Section

Initialiser = Literal["zero", "random", "svd"]
CollaborativeModules = Literal["attention", "ffn", "both"]
LinearMap = Literal["query", "key", "value", "output", "gate", "up", "down"]


class ExpansionWidths(Section):
    """How much each width of the base grows. `num_key_value_heads` follows from the base's grouped-query ratio."""

    hidden_size: PositiveInt
    """added to the residual stream"""
    intermediate_size: PositiveInt
    """added to the FFN"""
    num_attention_heads: PositiveInt
    """added query heads; a multiple of the query heads per key/value head"""


class Initialisers(Section):
    """How W21 and W22 start (the paper's Fig. 5); W12 always starts at zero."""

    base_to_expansion: Initialiser = "svd"
    """W21"""
    expansion_to_expansion: Initialiser = "zero"
    """W22"""


class ScaleMethod(Section):
    """SCALE: a frozen base, widened."""

    name: Literal["scale"]
    variant: Literal["preserve", "adapt", "route"] = "adapt"
    """stability (preserve) or plasticity (adapt), or the choice per token (route)"""
    expansion: ExpansionWidths
    l_fp: NonNegativeInt | None = None
    """lower layers without W12; needed by adapt and route"""
    collaborative_modules: CollaborativeModules = "attention"
    """where W12 trains, above l_fp"""
    router_threshold: Annotated[float, Field(ge=-1, le=1)] = 0.5
    """τ: above this cosine of the two paths a token is preserved"""
    norm: Literal["separate", "base"] = "separate"
    """which statistics normalise the expansion stream: its own, or the base stream's, as a model to serve needs"""
    initialisers: Initialisers = Initialisers()

    @model_validator(mode="after")
    def _l_fp_belongs_to_the_variant(self) -> ScaleMethod:
        if self.variant == "preserve" and self.l_fp is not None:
            raise ValueError(
                "l_fp does not apply to variant preserve, where every layer is a preservation layer; remove it"
            )
        if self.variant != "preserve" and self.l_fp is None:
            raise ValueError(
                f"variant {self.variant} needs l_fp, the number of lower layers without W12"
            )
        return self

    @property
    def of_initial_expansion(self) -> dict[str, Any]:
        """The settings that the initial expansion depends on: where W12 exists, the widths, the initialisers."""
        return self.model_dump(mode="json", exclude={"router_threshold", "norm"})


class FullFineTuning(Section):
    """Every parameter of the base trains."""

    name: Literal["fft"]


class Freeze(Section):
    """Full fine-tuning of all but the embedding and the bottom layers."""

    name: Literal["freeze"]
    frozen_layers: PositiveInt
    """how many of the bottom layers do not train"""


class Lora(Section):
    """Low-rank adapters (LoRA) of frozen linear maps: Y = W X + (alpha / rank) · B A X, where B starts at zero."""

    name: Literal["lora"]
    rank: PositiveInt
    """rows of A, columns of B"""
    alpha: PositiveFloat | None = None
    """default: the rank, so that B A X is not scaled"""
    target_modules: Annotated[tuple[LinearMap, ...], Field(min_length=1)] | None = None
    """the linear maps with an adapter, in every layer; default: all of the base's"""

    @property
    def scale(self) -> float:
        """The factor on B A X."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class LlamaPro(Section):
    """Depth expansion (LLaMA Pro): copies of blocks, whose output maps start at zero, train between frozen ones."""

    name: Literal["llama_pro"]
    added_layers: PositiveInt
    """how many blocks are copied; divides the base's layers"""


Method = Annotated[
    Union[ScaleMethod, FullFineTuning, Freeze, Lora, LlamaPro], Field(discriminator="name")
]


_TITLES = {"fft": "full fine-tuning", "freeze": "Freeze", "lora": "LoRA", "llama_pro": "LLaMA Pro"}


def title_of(name: str) -> str:
    """A method, or a variant of SCALE, as tables and pictures name it."""
    return _TITLES.get(name) or f"SCALE-{name.capitalize()}"
