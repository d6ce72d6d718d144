"""The run configuration: one YAML file a run, checked whole before anything starts.

Unknown keys are refused, and every fault is reported at once with its dotted path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import ConfigError

Initialiser = Literal["zero", "random", "svd"]
CollaborativeModules = Literal["attention", "ffn", "both"]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ExpansionWidths(Section):
    """How much each width of the base grows. `num_key_value_heads` follows from the base's grouped-query ratio."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt


class Initialisers(Section):
    """How W21 and W22 start (the paper's Fig. 5); W12 always starts at zero."""

    base_to_expansion: Initialiser = "svd"
    expansion_to_expansion: Initialiser = "zero"


class ScaleMethod(Section):
    """SCALE: a frozen base, widened (METHOD: Preserve, Adapt, Route)."""

    name: Literal["scale"]
    variant: Literal["preserve", "adapt", "route"] = "adapt"
    expansion: ExpansionWidths
    l_fp: NonNegativeInt | None = Field(default=None, description="lower layers without W12; needed by adapt and route")
    collaborative_modules: CollaborativeModules = "attention"
    router_threshold: Annotated[float, Field(ge=-1, le=1)] = 0.5
    norm: Literal["separate", "base"] = "separate"
    initialisers: Initialisers = Initialisers()

    @model_validator(mode="after")
    def _l_fp_belongs_to_the_variant(self) -> ScaleMethod:
        if self.variant == "preserve" and self.l_fp is not None:
            raise ValueError(
                "l_fp has no meaning for variant preserve, where every layer is a preservation layer; remove it"
            )
        if self.variant != "preserve" and self.l_fp is None:
            raise ValueError(f"variant {self.variant} needs l_fp, the number of lower layers without W12")
        return self


class FullFineTuning(Section):
    """Every parameter of the base trains."""

    name: Literal["fft"]


class Freeze(Section):
    """Full fine-tuning of all but the embedding and the bottom layers."""

    name: Literal["freeze"]
    frozen_layers: PositiveInt


class LlamaPro(Section):
    """Depth expansion (LLaMA Pro): copies of blocks, whose output maps start at zero, train between frozen ones."""

    name: Literal["llama_pro"]
    added_layers: PositiveInt


Method = Annotated[Union[ScaleMethod, FullFineTuning, Freeze, LlamaPro], Field(discriminator="name")]


class Corpus(Section):
    """One source of documents. Its token shards lie in `<data.folder>/<name>` and `<data.folder>/<name>.heldout`."""

    input: Annotated[list[str], Field(min_length=1)]
    heldout_input: list[str] = Field(default=[], description="files of their own for the held-out part")
    heldout_fraction: Fraction = Field(
        default=0.0, description="else this share of the documents, chosen by their hash"
    )
    text_key: str = "text"
    role: Literal["new", "replay"] = Field(default="new", description="replay: the base model's own domain")
    weight: PositiveFloat = Field(default=1.0, description="share among the corpora of the same role")
    epochs: PositiveFloat | None = Field(default=None, description="stop drawing from it after so many passes")
    token_budget: PositiveInt | None = Field(default=None, description="or after so many tokens")

    @model_validator(mode="after")
    def _one_limit_one_heldout(self) -> Corpus:
        if self.epochs is not None and self.token_budget is not None:
            raise ValueError("give epochs or token_budget, not both")
        if self.heldout_input and self.heldout_fraction:
            raise ValueError("give heldout_input or heldout_fraction, not both")
        return self


# A corpus is a folder beside the others, and `<name>.heldout` is the held-out part of `<name>`.
CorpusName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class Data(Section):
    """What is read, in which proportion, and how it is packed."""

    folder: Path
    sequence_length: PositiveInt
    corpora: Annotated[dict[CorpusName, Corpus], Field(min_length=1)]
    replay_fraction: Fraction = 0.0
    document_mask: bool = True

    @model_validator(mode="after")
    def _replay_has_a_source(self) -> Data:
        roles = {corpus.role for corpus in self.corpora.values()}
        if "new" not in roles:
            raise ValueError("no corpus has the role new: there is nothing to learn")
        if self.replay_fraction > 0 and "replay" not in roles:
            raise ValueError("replay_fraction is above 0 but no corpus has the role replay")
        return self


class Schedule(Section):
    """Steps, batch and learning rate. A batch counts sequences."""

    steps: PositiveInt
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    learning_rate: PositiveFloat
    decay: Literal["linear", "cosine", "wsd"] = "linear"
    warmup_fraction: Fraction = 0.06
    decay_fraction: Fraction = Field(default=0.1, description="share of the steps that wsd spends decaying")
    final_learning_rate_fraction: Fraction = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    gradient_clipping: PositiveFloat = 1.0


class Parallel(Section):
    """How the ranks are arranged; the data-parallel size is what is left."""

    tp_size: PositiveInt = 1


class Validation(Section):
    """Held-out perplexity during the run, one figure a corpus that has a held-out part."""

    every_steps: PositiveInt = 100
    max_sequences: PositiveInt = 64


class Checkpoints(Section):
    """When to save, and what to keep."""

    every_steps: PositiveInt = 500
    keep_last: PositiveInt = 2
    asynchronous: bool = Field(
        default=False, description="train on while a copy in the host's memory, of what this rank saves, is written"
    )


class RunConfig(Section):
    """Everything that a run is made of."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    folder: Path
    seed: NonNegativeInt = 1234
    base: Path
    upscaled: Path | None = Field(default=None, description="the initial expansion; default <folder>/upscaled")
    method: Method
    data: Data
    schedule: Schedule
    parallel: Parallel = Parallel()
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    deepspeed: Path
    activation_checkpointing: Literal["none", "collaborative", "all"] = "none"

    @property
    def upscaled_folder(self) -> Path:
        """Where the initial expansion lies."""
        return self.upscaled or self.folder / "upscaled"


def parse_config(values: Mapping[str, Any], *, source: str) -> RunConfig:
    """Checks `values`.

    Raises:
        ConfigError: with every fault and its dotted path, in one line; `source` says where they came from.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(f"{_dotted(fault['loc'])}: {_plain(fault)}" for fault in error.errors())
        raise ConfigError(f"{source}: {error.error_count()} fault(s): {faults}") from None


def load_config(path: Path) -> RunConfig:
    """Reads and checks the YAML file at `path`; relative paths in it count from the working directory.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not describe a run.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    return parse_config(values, source=str(path))


def _dotted(location: tuple[int | str, ...]) -> str:
    # pydantic names the member of a tagged union in the path (method.scale.l_fp); users never wrote that word.
    parts = [str(part) for part in location]
    if len(parts) > 1 and parts[0] == "method":
        parts = [parts[0], *parts[2:]]
    return ".".join(parts) or "the configuration"


def _plain(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        return "unknown key"
    if fault["type"] == "missing":
        return "missing"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if isinstance(fault.get("input"), (str, int, float, bool)):
        message += f" (found {fault['input']!r})"
    return message
