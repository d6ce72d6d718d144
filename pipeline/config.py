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

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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
    l_fp: NonNegativeInt | None = Field(default=None, description="lower layers without W12; needed by adapt and route")
    collaborative_modules: CollaborativeModules = "attention"
    """where W12 trains, above l_fp"""
    router_threshold: Annotated[float, Field(ge=-1, le=1)] = 0.5
    """τ: above this cosine of the two paths a token is preserved"""
    norm: Literal["separate", "base"] = "separate"
    """which statistics normalise the expansion stream: its own, or the base stream's (needed for stock export)"""
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
    """how many of the bottom layers do not train"""


class LlamaPro(Section):
    """Depth expansion (LLaMA Pro): copies of blocks, whose output maps start at zero, train between frozen ones."""

    name: Literal["llama_pro"]
    added_layers: PositiveInt
    """how many blocks are copied; divides the base's layers"""


Method = Annotated[Union[ScaleMethod, FullFineTuning, Freeze, LlamaPro], Field(discriminator="name")]


class Corpus(Section):
    """One source of documents. Its token shards lie in `<data.folder>/<name>` and `<data.folder>/<name>.heldout`."""

    input: Annotated[list[str], Field(min_length=1)]
    """files or patterns: JSONL (.gz, .zst, .xz), Parquet, text; or folders saved by datasets"""
    heldout_input: list[str] = Field(default=[], description="files of their own for the held-out part")
    heldout_fraction: Fraction = Field(
        default=0.0, description="else this share of the documents, chosen by their hash"
    )
    text_key: str = "text"
    """the field or column that holds the text"""
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
    """where the token corpora lie"""
    sequence_length: PositiveInt
    """tokens a sample; at most the base's context"""
    corpora: Annotated[dict[CorpusName, Corpus], Field(min_length=1)]
    """by name"""
    replay_fraction: Fraction = 0.0
    """share of the samples drawn from the corpora of role replay"""
    document_mask: bool = True
    """attention and positions stay within a document"""

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
    """optimizer steps"""
    global_batch_size: PositiveInt
    """sequences a step"""
    micro_batch_size: PositiveInt
    """sequences a rank holds at a time; with the data-parallel size it divides global_batch_size"""
    learning_rate: PositiveFloat
    """the highest"""
    decay: Literal["linear", "cosine", "wsd"] = "linear"
    """after the warm-up"""
    warmup_fraction: Fraction = 0.06
    """share of the steps"""
    decay_fraction: Fraction = Field(default=0.1, description="share of the steps that wsd spends decaying")
    final_learning_rate_fraction: Fraction = 0.0
    """what is left at the end"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """of matrices; vectors do not decay"""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """of AdamW"""
    gradient_clipping: PositiveFloat = 1.0
    """the largest global norm"""


class Parallel(Section):
    """How the ranks are arranged; the data-parallel size is what is left."""

    tp_size: PositiveInt = 1
    """ranks that share each layer; best within a node"""


class Validation(Section):
    """Held-out perplexity during the run, one figure a corpus that has a held-out part."""

    every_steps: PositiveInt = 100
    """also at the beginning and the end"""
    max_sequences: PositiveInt = 64
    """of each held-out part"""


class Checkpoints(Section):
    """When to save, and what to keep."""

    every_steps: PositiveInt = 500
    """also at the end and on a signal"""
    keep_last: PositiveInt = 2
    """how many stay"""
    asynchronous: bool = Field(
        default=False, description="train on while a copy in the host's memory, of what this rank saves, is written"
    )


class RunConfig(Section):
    """Everything that a run is made of."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """of letters, digits, dots, dashes"""
    folder: Path
    """everything that the run writes"""
    seed: NonNegativeInt = 1234
    """of the data order and of random initial blocks"""
    base: Path
    """a Hugging Face folder with safetensors"""
    upscaled: Path | None = Field(default=None, description="the initial expansion; default <folder>/upscaled")
    method: Method
    """what trains"""
    data: Data
    """what is read"""
    schedule: Schedule
    """how long and how fast"""
    parallel: Parallel = Parallel()
    """how the ranks are arranged"""
    validation: Validation = Validation()
    """held-out scores during the run"""
    checkpoints: Checkpoints = Checkpoints()
    """when to save"""
    deepspeed: Path
    """a file of ds_configs/: ZeRO and precision"""
    activation_checkpointing: Literal["none", "collaborative", "all"] = "none"
    """recompute activations in the backward pass: of the layers above l_fp, or of all"""

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
        raise ConfigError(
            f"{source}: {error.error_count()} fault(s): {faults}; docs/configuration.md lists every setting"
        ) from None


def load_config(path: Path) -> RunConfig:
    """Reads and checks the YAML file at `path`; relative paths in it count from the working directory.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not describe a run.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this configuration: {error.strerror}") from None
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
