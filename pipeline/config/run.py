"""The run configuration: one YAML file a run, checked whole before anything starts.

Unknown keys are refused, and every fault is reported at once with its dotted path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.data import Data
from pipeline.config.method import Method
from pipeline.config.observation import Metrics, Profile
from pipeline.config.preflight import Preflight
from pipeline.config.reading import checked, read_yaml
from pipeline.config.section import Decay, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section
from pipeline.config.stability import Forgetting, Stability, Watchdog


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
    sequence_parallel: bool = Field(
        default=False, description="between shared layers a rank holds its share of each sequence only: less memory"
    )


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
    keep_every_steps: PositiveInt | None = Field(default=None, description="those after its multiples stay for good")
    asynchronous: bool = Field(
        default=False, description="train on while a copy in the host's memory, of what this rank saves, is written"
    )

    @model_validator(mode="after")
    def _what_stays_is_saved(self) -> Checkpoints:
        if self.keep_every_steps is not None and self.keep_every_steps % self.every_steps:
            raise ValueError(f"keep_every_steps must be a multiple of every_steps {self.every_steps}")
        return self


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
    upscaled: Path | None = Field(
        default=None,
        description="an expansion to train on, exported by another run; default: a new one, in <folder>/upscaled",
    )
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
    stability: Stability = Stability()
    """what is done about steps that go wrong"""
    forgetting: Forgetting = Forgetting()
    """how much may be lost"""
    preflight: Preflight = Preflight()
    """what is measured before the first step"""
    watchdog: Watchdog = Watchdog()
    """when to give up on ranks that died or hang"""
    metrics: Metrics = Metrics()
    """how speed is told"""
    profile: Profile = Profile()
    """which steps are traced"""
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
    return checked(RunConfig, values, source=source, listed_in="docs/configuration.md")


def load_config(path: Path) -> RunConfig:
    """Reads and checks the YAML file at `path`; relative paths in it count from the working directory.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not describe a run.
    """
    return parse_config(read_yaml(path), source=str(path))
