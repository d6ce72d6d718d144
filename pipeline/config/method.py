"""The section `method` of a run configuration: what trains, and how it starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeGuard, Union, get_args

from pydantic import Field, model_validator

from pipeline.config.reading import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    with_todays_names,
)
from pipeline.errors import ExtensionError
from pipeline.extension import OfferedMethod, extensions, load_class

Initialiser = Literal["zero", "random", "svd"]
CollaborativeModules = Literal["attention", "ffn", "both"]
LinearMap = Literal["query", "key", "value", "output", "gate", "up", "down"]


class ExpansionWidths(Section):
    """How much is added to each width of the base.

    The number of key/value heads follows from the base's ratio of query heads to them.
    """

    hidden_size: PositiveInt
    """channels added to the residual stream"""
    intermediate_size: PositiveInt
    """channels added to the FFN"""
    num_attention_heads: PositiveInt
    """query heads added, a multiple of those per key/value head"""


class Initialisers(Section):
    """How W21 and W22 start (the paper's Fig. 5); W12 always starts at zero."""

    base_to_expansion: Initialiser = "svd"
    """W21, the blocks from the base's channels to the added ones"""
    expansion_to_expansion: Initialiser = "zero"
    """W22, the blocks among the added channels"""


class OpenRows(Section):
    """Open rows: of embedding and output, for tokens that a gate opens."""

    min_count: PositiveInt = 20
    """occurrences in the corpora of role new that give a token its own row; rarer tokens share
    one"""


class MethodSettings(Section):
    """The settings of one training method; a subclass narrows `name` to its own.

    Attributes:
        title: what tables and figures call the method.
        keeps_base: whether the base's own weights stay frozen, so that the model can be compared
            with the base while it trains.
    """

    title: ClassVar[str]
    keeps_base: ClassVar[bool] = True

    name: str

    @model_validator(mode="before")
    @classmethod
    def _earlier_names_are_read(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return with_todays_names(values, known=cls.model_fields)
        return values

    @property
    def gated_settings(self) -> str | None:
        """Settings of weights that only tokens which a gate opens may read; None: none is set."""
        return None


class ScaleMethod(MethodSettings):
    """SCALE: a frozen base, widened."""

    title = "SCALE"

    name: Literal["scale"]
    variant: Literal["preserve", "adapt", "route"] = "adapt"
    """preserve keeps the base stream exactly; adapt trains W12 in the upper layers; route chooses
    for each token (docs/method.md)"""
    expansion: ExpansionWidths
    l_fp: NonNegativeInt | None = None
    """lower layers without W12; adapt and route need it"""
    collaborative_modules: CollaborativeModules = "attention"
    """where W12 trains, from layer l_fp on"""
    router_threshold: Annotated[float, Field(ge=-1, le=1)] = 0.5
    """τ of route: above this cosine of its two paths' logits a token takes their mean, else the
    adapted path"""
    norm: Literal["separate", "base"] = "separate"
    """stream whose mean square normalises the expansion stream: its own, or the base's, which a
    merged export needs"""
    initialisers: Initialisers = Initialisers()
    open_rows: OpenRows | Literal["all"] | None = None
    """trained differences of embedding and output rows, for open tokens (docs/open_weights.md): of
    frequent tokens, or of all"""
    open_gains: bool = False
    """trained differences of the norms' gains, for open tokens"""
    low_rank: PositiveInt | None = None
    """rank of trained differences B A of the base's linear maps, for open tokens"""
    open_first_layer: NonNegativeInt | None = None
    """for preserve: first layer with open weights; for adapt it is l_fp"""

    @property
    def has_open_weights(self) -> bool:
        """Whether there are open rows, open gains or low-rank differences."""
        return self.open_rows is not None or self.open_gains or self.low_rank is not None

    @property
    def gated_settings(self) -> str | None:
        return "open_rows, open_gains, low_rank" if self.has_open_weights else None

    @model_validator(mode="after")
    def _open_weights_fit_the_variant(self) -> ScaleMethod:
        if not self.has_open_weights:
            if self.open_first_layer is not None:
                raise ValueError(
                    "open_first_layer belongs to open_rows, open_gains or low_rank; set one of "
                    "them, or remove it"
                )
            return self
        if self.variant == "route":
            raise ValueError(
                "open_rows, open_gains and low_rank do not go with variant route, which chooses a "
                "path by its logits, after the layers have run; take variant adapt"
            )
        if self.variant == "preserve" and self.open_first_layer is None:
            raise ValueError(
                "open_first_layer: expected with variant preserve the first layer in which open "
                "tokens have weights of their own, such as 1"
            )
        if self.variant == "adapt" and self.open_first_layer is not None:
            raise ValueError(
                "open_first_layer does not apply to variant adapt, where it is l_fp; remove it"
            )
        return self

    @model_validator(mode="after")
    def _l_fp_belongs_to_the_variant(self) -> ScaleMethod:
        if self.variant == "preserve" and self.l_fp is not None:
            raise ValueError(
                "l_fp does not apply to variant preserve, where every layer is a preservation "
                "layer; remove it"
            )
        if self.variant != "preserve" and self.l_fp is None:
            raise ValueError(
                f"variant {self.variant} needs l_fp, the number of lower layers without W12"
            )
        return self

    @property
    def initial_expansion_settings(self) -> dict[str, Any]:
        """The settings that the initial expansion depends on: variant, widths, initialisers."""
        settings = self.model_dump(mode="json", exclude={"router_threshold", "norm"})
        if not self.has_open_weights:
            # Expansions that were made before these settings existed are recorded without them, and
            # must compare as equal.
            for name in ("open_rows", "open_gains", "low_rank", "open_first_layer"):
                del settings[name]
        return settings


class FullFineTuning(MethodSettings):
    """Every parameter of the base trains."""

    title = "full fine-tuning"
    keeps_base = False

    name: Literal["fft"]


class Freeze(MethodSettings):
    """Full fine-tuning of all but the embedding and the bottom layers."""

    title = "Freeze"
    keeps_base = False

    name: Literal["freeze"]
    frozen_layers: PositiveInt
    """bottom layers that do not train"""


class Lora(MethodSettings):
    """LoRA adapters of frozen linear maps: Y = W X + (alpha / rank) · B A X; B starts at zero.

    With a gate, only tokens that it opens read the adapters, and the rows and gains beside them.
    """

    title = "LoRA"

    name: Literal["lora"]
    rank: PositiveInt
    """rows of A and columns of B"""
    alpha: PositiveFloat | None = None
    """numerator of the factor alpha / rank; default: the rank"""
    target_modules: Annotated[tuple[LinearMap, ...], Field(min_length=1)] | None = None
    """maps with an adapter, in every layer; default: all"""
    open_rows: OpenRows | Literal["all"] | None = None
    """as in method scale"""
    open_gains: bool = False
    """as in method scale"""
    open_first_layer: NonNegativeInt = 0
    """first layer with adapters and open gains; open rows enter there"""

    @property
    def scale(self) -> float:
        """The factor on B A X."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @property
    def has_open_weights(self) -> bool:
        """Whether there are open rows or open gains beside the adapters."""
        return self.open_rows is not None or self.open_gains

    @property
    def gated_settings(self) -> str | None:
        # Its adapters themselves are the low-rank differences, and need no gate.
        return "open_rows, open_gains" if self.has_open_weights else None

    @property
    def initial_expansion_settings(self) -> dict[str, Any]:
        """The settings that the initial values in a folder depend on."""
        return self.model_dump(mode="json")


class LlamaPro(MethodSettings):
    """LLaMA Pro: copies of blocks, whose output maps start at zero, train between frozen blocks."""

    title = "LLaMA Pro"

    name: Literal["llama_pro"]
    added_layers: PositiveInt
    """copied blocks, a divisor of the base's number of layers"""


CORE_METHODS: tuple[type[MethodSettings], ...] = (
    ScaleMethod,
    FullFineTuning,
    Freeze,
    Lora,
    LlamaPro,
)


def _name_of(settings: type[MethodSettings]) -> str:
    """The name that selects a method."""
    name: str = get_args(settings.model_fields["name"].annotation)[0]
    return name


@cache
def offered_methods() -> Mapping[str, OfferedMethod]:
    """The methods of the installed extensions, by name.

    Raises:
        ExtensionError: an extension cannot be used, or has a method of a name that is there.
    """
    taken = {_name_of(settings) for settings in CORE_METHODS}
    offered: dict[str, OfferedMethod] = {}
    for extension in extensions():
        for method in extension.methods():
            name = _name_of(load_class(method.settings, MethodSettings))
            if name in taken or name in offered:
                raise ExtensionError(
                    f"extension {extension.name}: its method {name} is there already; give it "
                    "another name"
                )
            offered[name] = method
    return offered


@cache
def method_settings() -> Mapping[str, type[MethodSettings]]:
    """The settings of every method, of the core and of extensions, by name."""
    settings = {_name_of(one): one for one in CORE_METHODS}
    for name, offered in offered_methods().items():
        settings[name] = load_class(offered.settings, MethodSettings)
    return settings


def recorded_method(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The section `method` that an earlier version may have recorded, with today's names.

    Raises:
        ValueError: a setting has two names, with different values.
    """
    settings = method_settings().get(str(recorded.get("name")))
    if settings is None:
        return dict(recorded)
    return with_todays_names(recorded, known=settings.model_fields)


# Chosen by its `name`, so that errors are about the settings of that method alone.
if TYPE_CHECKING:
    Method = Annotated[
        Union[ScaleMethod, FullFineTuning, Freeze, Lora, LlamaPro], Field(discriminator="name")
    ]
else:
    Method = Annotated[Union[tuple(method_settings().values())], Field(discriminator="name")]


def starts_from_expansion(method: Method) -> TypeGuard[ScaleMethod | Lora]:
    """Whether a run's initial values are in a folder, which `scale-cpt upscale` makes.

    SCALE's initial values are decompositions of the base's matrices. LoRA with open rows needs the
    folder for the ids that have rows, which are counted in the run's corpora.
    """
    if isinstance(method, ScaleMethod):
        return True
    return isinstance(method, Lora) and method.open_rows is not None


def title_of(name: str) -> str:
    """The title of a method, or of a variant of SCALE, in tables and figures."""
    settings = method_settings().get(name)
    if settings is None or settings is ScaleMethod:
        return f"SCALE-{name.capitalize()}"
    return settings.title
